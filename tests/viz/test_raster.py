"""A fixed raster: its numbers are those of the slow schedule, its text is exact, it has a cell for each visit."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from raster import walk

from trencadis.cli.sizes import random_sizes
from trencadis.viz import Mosaic, Raster, show

NOTE = "drawn   a fixed-raster schedule, as in megablox; not the tiles of our kernels"
SVG = "{http://www.w3.org/2000/svg}"

CASES = {
    "small": dict(group_sizes=[3, 0, 5], tile=4),
    "unowned": dict(group_sizes=[3, 0, 5], tile=4, m=10),
    "window": dict(group_sizes=[3, 0, 5, 6], tile=4, m=16, group_offset=1, num_groups=2),
    "one group": dict(group_sizes=[5], tile=3),
    "tile past m": dict(group_sizes=[1, 1], tile=128),
    "all empty": dict(group_sizes=[0, 0], tile=4),
    "all empty, with rows": dict(group_sizes=[0, 0], tile=4, m=6),
    "no groups": dict(group_sizes=[], tile=4),
    "no groups, with rows": dict(group_sizes=[], tile=4, m=6),
    "no local group": dict(group_sizes=[4, 4], tile=4, num_groups=0),
    "eight": dict(group_sizes=random_sizes(8, 4096), tile=512),
    "zipf": dict(group_sizes=random_sizes(128, 32768), tile=128),
    "zipf window": dict(group_sizes=random_sizes(128, 32768), tile=128, m=40000, group_offset=10, num_groups=50),
    "thousand": dict(group_sizes=random_sizes(1000, 200_000), tile=128),
    "empties": dict(group_sizes=[0, 7] * 40, tile=16),
    "prime tile": dict(group_sizes=[100, 100, 100], tile=127),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_small_text():
    assert str(show([3, 0, 5], tile=4)) == repr(show([3, 0, 5], tile=4))
    assert show([3, 0, 5], tile=4).text().splitlines() == [
        "rows    0 1 2 3 │ 4 5 6 7",
        "group   0 0 0 2 │ 2 2 2 2",
        "visits  (0,0) (2,0) (2,1)",
        "total   3 visits, 2 tiles of 4 rows, 8 of 8 rows owned, 1 empty group, 33% waste",
        NOTE,
    ]


def test_unowned_and_window_text():
    assert show([3, 0, 5], tile=4, m=10, group_offset=1).text().splitlines() == [
        "rows    0 1 2 3 │ 4 5 6 7 │ 8 9",
        "group   · · · 2 │ 2 2 2 2 │ · ·",
        "visits  (2,0) (2,1)",
        "total   2 visits, 3 tiles of 4 rows, 5 of 10 rows owned, 1 empty group, 38% waste",
        NOTE,
    ]


def test_wide_numbers_line_up():
    rows, groups, *_ = show([0] * 10 + [6, 6], tile=6).text().splitlines()
    assert rows == "rows     0  1  2  3  4  5 │  6  7  8  9 10 11"
    assert groups == "group   10 10 10 10 10 10 │ 11 11 11 11 11 11"


def test_large_text():
    assert show([48, 80, 0, 64], tile=64, m=256).text().splitlines() == [
        "rows    a character is 1 row, │ ends a tile; below: groups that share it",
        "     0  " + "0" * 48 + "1" * 16 + "│",
        "        2",
        "    64  " + "1" * 64 + "│",
        "   128  " + "3" * 64 + "│",
        "   192  " + "·" * 64 + "│",
        "shared  1 of 4 tiles, most by 2 groups (tile 0)",
        "unowned 64 rows, marked ·",
        "empty   group 2",
        "sizes   0  █████████████████████████████ 48",
        "        1  ████████████████████████████████████████████████ 80",
        "        2  0",
        "        3  ██████████████████████████████████████ 64",
        "total   4 visits, 4 tiles of 64 rows, 192 of 256 rows owned, 1 empty group, 25% waste",
        NOTE,
    ]


def test_histogram_of_many_groups():
    lines = show([0, 1, 3, 3, 100] * 4, tile=8).text().splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("sizes"))
    bars = [re.sub("█+ ", "", line[8:].strip()) for line in lines[top:-2]]
    assert bars == ["0  4 groups", "1  4 groups", "2-3  8 groups", "4-7  0 groups", "8-15  0 groups", "16-31  0 groups",
                    "32-63  0 groups", "64-127  4 groups"]  # fmt: skip


@each_case
def test_numbers_are_those_of_the_walk(case):
    raster = show(**case)
    sizes, first = case["group_sizes"], case.get("group_offset", 0)
    m, local = case.get("m", sum(sizes)), case.get("num_groups", len(sizes) - first)
    pairs = walk(sizes, m, case["tile"], first=first, local_groups=local)
    assert list(raster.pairs) == pairs
    assert raster.visits == len(pairs)
    assert raster.tiles == -(-m // case["tile"])
    assert raster.owned == sum(sizes[first : first + local]) == sum(len(cell.owned) for cell in raster.cells)
    assert raster.owned + raster.unowned == m
    assert raster.waste == pytest.approx(1 - raster.owned / (len(pairs) * case["tile"]) if pairs else 0)
    assert sum(raster.visits_per_tile) == len(pairs)
    assert raster.shared == tuple(t for t in range(raster.tiles) if sum(tile == t for _, tile in pairs) > 1)
    assert raster.empty == tuple(g for g in range(first, first + local) if sizes[g] == 0)


@each_case
@pytest.mark.parametrize("width", [30, 80, 200])
def test_text_stays_readable(case, width):
    text = show(**case).text(width)
    assert " ".join(text[text.index("\ndrawn ") :].split()) == " ".join(NOTE.split())
    body = text[: text.index("total ")].splitlines()
    assert len(body) <= 60
    assert all(len(line) <= min(max(width, 40), 120) for line in body)
    assert all(line == line.rstrip() for line in body)


@each_case
def test_every_row_is_drawn_once_in_the_picture(case):
    raster = show(**case)
    root = ElementTree.fromstring(raster.svg())
    kinds = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert kinds.count("visit") == raster.visits
    tips = [path.findtext(f"{SVG}title") for path in root.iter(f"{SVG}path") if path.get("class") == "visit"]
    rows = [tuple(map(int, re.findall(r"\d+", tip))) for tip in tips]
    assert [(group, tile) for group, tile, _, _ in rows] == list(raster.pairs)
    assert sum(end - start + 1 for _, _, start, end in rows) == raster.owned
    # hatched pieces: at least one if a row is unowned, besides the one of the legend
    hatched = sum("trencadis-unowned" in (path.get("fill") or "") for path in root.iter(f"{SVG}path"))
    assert (hatched > 1) == (raster.unowned > 0)
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("class") == "size"]
    assert len(bars) == sum(size > 0 for size in raster.sizes)


@each_case
def test_picture_lies_inside_its_frame(case):
    root = ElementTree.fromstring(show(**case).svg())
    _, _, width, height = map(float, root.get("viewBox").split())
    for element in root.iter():
        if element.tag in (f"{SVG}text", f"{SVG}rect") and element.get("x"):
            assert 0 <= float(element.get("x")) <= width
            assert 0 <= float(element.get("y")) <= height
        if element.tag == f"{SVG}rect" and element.get("width"):
            assert float(element.get("width")) > 0 and float(element.get("height")) > 0


def test_picture_is_deterministic_and_says_the_numbers(tmp_path):
    raster = show([3, 0, 5], tile=4)
    assert raster.svg() == show(np.array([3, 0, 5]), tile=4).svg() == raster._repr_svg_()
    words = " ".join(text.text for text in ElementTree.fromstring(raster.svg()).iter(f"{SVG}text"))
    assert NOTE.removeprefix("drawn   ") in words
    for expected in ("3 groups over 8 rows in tiles of 4", "3 visits", "2 tiles", "1 shared", "33% waste", "group 1"):
        assert expected in words
    path = raster.save(tmp_path / "raster.svg")
    assert path.read_text(encoding="utf-8") == raster.svg()


def test_a_huge_schedule_shows_as_text_in_a_notebook():
    raster = show([15_000, 15_000], tile=1)
    assert raster._repr_svg_() is None
    assert len(str(raster)) < 5000


def test_value_semantics():
    assert show([3, 0, 5], tile=4) == show(
        jnp.array([3, 0, 5], jnp.int8), tile=np.int64(4), m=8, group_offset=jnp.array([0])
    )
    assert len({show([3, 0, 5], tile=4), show((3, 0, 5), tile=4)}) == 1
    assert isinstance(show([1], tile=1), Raster) and issubclass(Raster, Mosaic)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(group_sizes=[3, -1], tile=4), "group_sizes: sizes must be >= 0; group 1 has -1"),
        (dict(group_sizes=[3, 2], tile=4, m=4), "group_sizes: must sum to at most m = 4 rows; got a sum of 5"),
        (dict(group_sizes=[[3]], tile=4), r"group_sizes: want 1 dimension \[g\]; got 2"),
        (dict(group_sizes=[1.5], tile=4), "group_sizes: want integers; got dtype float64"),
        (dict(group_sizes=[3], tile=0), "tile: want a positive int; got 0"),
        (dict(group_sizes=[3], tile=True), "tile: want a positive int; got True"),
        (dict(group_sizes=[3], tile=4, m=-1), "m: want a nonnegative int; got -1"),
        (dict(group_sizes=[2**30] * 3, tile=4), r"m: want fewer than 2\*\*31 rows"),
        (dict(group_sizes=[3], tile=4, group_offset=2), "group_offset: want 0 to 1, the number of groups; got 2"),
        (
            dict(group_sizes=[3], tile=4, num_groups=2),
            "num_groups: want at most 1, the groups from group_offset = 0 on",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        show(**arguments)


def test_traced_sizes_are_refused():
    with pytest.raises(ValueError, match="group_sizes: want values known now"):
        jax.jit(lambda sizes: show(sizes, tile=4).visits)(jnp.array([1]))


def test_colours_through_rich_and_none_without():
    from rich import console

    raster = show([3, 0, 5], tile=4)
    plain, colourful = io.StringIO(), io.StringIO()
    console.Console(file=plain, width=80).print(raster)
    console.Console(file=colourful, width=80, force_terminal=True, color_system="truecolor").print(raster)
    assert plain.getvalue().rstrip("\n") == raster.text(80)
    assert "\x1b[38;2;255;255;255;48;2;0;114;178m" in colourful.getvalue()  # white on the colour of group 0
    assert re.sub(r"\x1b\[[\d;]*m", "", colourful.getvalue()) == plain.getvalue()
