"""Results as pictures: `python -m benchmarks.plot results/<device>/<date>.json [--out docs/img] [--format svg]`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.cells import BASE, Cell
from benchmarks.report import Report, device_slug

PASS_NAMES = {"forward": "forward", "d_lhs": "d lhs", "d_rhs": "d rhs"}
# colours that colour-blind readers can tell apart (Okabe and Ito), and a shape for each
LOOKS = {
    "ours": ("#000000", "o"),
    "numpy": ("#E69F00", "s"),
    "dense": ("#56B4E9", "D"),
    "ragged_dot": ("#D55E00", "^"),
    "megablox": ("#009E73", "v"),
    "tokamax": ("#CC79A7", "P"),
    "torch": ("#0072B2", "X"),
}


def ratios(cells: Sequence[Cell], title: str) -> Any:
    """A panel per pass and dtype: the peer's time over ours, on a log axis; right of 1 we are faster."""
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((cell.which, cell.dtype) for cell in cells))
    rows = list(dict.fromkeys(which for which, _ in panels))
    columns = list(dict.fromkeys(dtype for _, dtype in panels))
    names = list(dict.fromkeys(cell.problem for cell in cells))
    size = (5.2 * len(columns) + 1.2, len(rows) * (0.34 * len(names) + 0.9) + 0.9)
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, sharex=True, squeeze=False, layout="constrained")
    for (which, dtype), axis in [((w, d), axes[i][j]) for i, w in enumerate(rows) for j, d in enumerate(columns)]:
        for cell in (c for c in cells if (c.which, c.dtype) == (which, dtype)):
            for peer, ratio in cell.ratios.items():
                colour, shape = LOOKS.get(peer, ("#999999", "."))
                axis.plot(1 / ratio, names.index(cell.problem), shape, color=colour, label=peer, markersize=7)
        axis.axvline(1, color="#000000", linewidth=1)
        axis.set(xscale="log", yticks=range(len(names)), title=f"{PASS_NAMES[which]}, {dtype}")
        axis.set_yticklabels(names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("time of the peer / time of ours: right of 1 ours is faster")
    _legend(figure, axes)
    figure.suptitle(title)
    return figure


def scaling(families: dict[str, list[Cell]], title: str) -> Any:
    """A panel per axis and pass: milliseconds against g or m, both logarithmic; the band spans the quartiles."""
    import matplotlib.pyplot as plt

    passes = list(dict.fromkeys((c.which, c.dtype) for cells in families.values() for c in cells))
    size = (4.2 * len(passes), 3.4 * len(families) + 0.6)
    figure, axes = plt.subplots(len(families), len(passes), figsize=size, squeeze=False, layout="constrained")
    for i, (along, cells) in enumerate(families.items()):
        for j, (which, dtype) in enumerate(passes):
            axis = axes[i][j]
            mine = [cell for cell in cells if (cell.which, cell.dtype) == (which, dtype)]
            for name in dict.fromkeys(name for cell in mine for name in cell.times):
                points = [(cell.shape[along], cell.times[name]) for cell in mine if name in cell.times]
                x = [at for at, _ in points]
                colour, shape = LOOKS.get(name, ("#999999", "."))
                axis.plot(x, [t.median * 1e3 for _, t in points], f"{shape}-", color=colour, label=name, markersize=5)
                axis.fill_between(x, [t.q1 * 1e3 for _, t in points], [t.q3 * 1e3 for _, t in points], color=colour,
                                  alpha=0.2, linewidth=0)  # fmt: skip
            axis.set(xscale="log", yscale="log", xlabel=along, ylabel="ms", title=f"{PASS_NAMES[which]}, {dtype}")
            axis.set_xscale("log", base=2)
            axis.grid(color="#dddddd", linewidth=0.6)
    _legend(figure, axes)
    figure.suptitle(title)
    return figure


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels."""
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False)


def draw(made: Report, folder: pathlib.Path, kind: str = "svg") -> list[pathlib.Path]:
    """Write the pictures that the report has data for; returns their paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "trencadis"  # the same results give the same file
    import matplotlib.pyplot as plt

    where = made.environment
    title = f"{where['cpu'] if where['platform'] == 'cpu' else where['device']}, {where['clock']}, {where['date']}"
    timed = [cell for cell in made.cells if len(cell.times) > 1 and BASE in cell.times]
    figures = {}
    if timed:
        figures["ratios"] = ratios(timed, title)
    if made.scaling:
        figures["scaling"] = scaling(made.scaling, title)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}-{device_slug(where)}.{kind}"
        figure.savefig(path, metadata={"Date": None} if kind == "svg" else None)
        plt.close(figure)
        written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Draw each file of results."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw results.")
    ask.add_argument("results", nargs="+", type=pathlib.Path)
    ask.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/img"), help="default: %(default)s")
    ask.add_argument("--format", choices=("svg", "png"), default="svg", help="default: %(default)s")
    asked = ask.parse_args(argv)
    for path in asked.results:
        print(*draw(Report.from_json(path.read_text()), asked.out, asked.format), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
