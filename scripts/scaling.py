"""Draw the times of docs/scaling.md: products, and communication of each strategy, by the number of devices.

python scripts/scaling.py      writes docs/img/scaling-pods.svg
"""

from __future__ import annotations

import pathlib

from matplotlib.figure import Figure

from trencadis.parallel import STRATEGIES, Pod, step_times

TOKENS = 4096  # on each device
MODELS = {"qwen3-30b-a3b": (2048, 768, 128, 8), "gpt-oss-120b": (2880, 2880, 128, 4)}  # d, f, experts, k
PODS = {
    "v6e, mesh": ("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16"),
    "v5p, torus": ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8"),
}
OUT = pathlib.Path(__file__).parents[1] / "docs/img/scaling-pods.svg"


def main() -> None:
    """Write the picture: a row for each model, a column for each kind of pod."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots(len(MODELS), len(PODS), sharex=True, squeeze=False)
    for row, (model, (d, f, experts, k)) in zip(axes, MODELS.items(), strict=True):
        for each, (name, pods) in zip(row, PODS.items(), strict=True):
            sizes = [Pod.named(pod).devices for pod in pods]
            for strategy in STRATEGIES:
                times = [
                    step_times(
                        Pod.named(pod), strategy, tokens=TOKENS, k=k, d=d, f=f, local=experts // size,
                        capacity=int(1.25 * TOKENS * k),
                    )
                    for pod, size in zip(pods, sizes, strict=True)
                ]  # fmt: skip
                each.plot(sizes, [1e3 * t.communication for t in times], marker="o", label=strategy)
            each.axhline(1e3 * times[0].products, color="black", linestyle="--", label="products")
            each.set(xscale="log", yscale="log", title=f"{model}, {name}", xticks=sizes, xticklabels=sizes)
            each.minorticks_off()
    for each in axes[:, 0]:
        each.set_ylabel("ms of a step")
    for each in axes[-1]:
        each.set_xlabel("devices")
    axes[0, 0].legend()
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
