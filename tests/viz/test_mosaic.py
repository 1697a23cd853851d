"""The tiles of a backend: the picture has those that the backend takes, its text is exact, every row is drawn once."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from trencadis.backends import BACKENDS, xla
from trencadis.backends.gpu import tile_scheduler
from trencadis.cli.sizes import random_sizes
from trencadis.core.arguments import problem_of
from trencadis.core.devices import target_of
from trencadis.core.plan import plan
from trencadis.viz import Mosaic, Raster, show

SVG = "{http://www.w3.org/2000/svg}"
F32 = dict(dtype="float32", target="cpu")  # what XLA does with bfloat16 depends on the CPU
CASES = {
    "small": dict(group_sizes=[3, 0, 5], **F32),
    "unowned": dict(group_sizes=[3, 0, 5], m=20, **F32),
    "window": dict(group_sizes=[3, 0, 5, 6], m=16, group_offset=1, num_groups=2, **F32),
    "contraction": dict(group_sizes=[300, 0, 45], m=400, form="contraction", **F32),
    "all empty": dict(group_sizes=[0, 0], **F32),
    "all empty, with rows": dict(group_sizes=[0, 0], m=6, **F32),
    "no groups": dict(group_sizes=[], **F32),
    "no local group": dict(group_sizes=[4, 4], num_groups=0, **F32),
    "no columns": dict(group_sizes=[4, 4], n=0, **F32),
    "far more rows than owned": dict(group_sizes=[100, 150, 50], m=60_000, **F32),
    "many": dict(group_sizes=random_sizes(128, 32768), k=4096, **F32),
    "many, window": dict(group_sizes=random_sizes(128, 32768), m=40_000, group_offset=10, num_groups=50, **F32),
    "thousand": dict(group_sizes=random_sizes(1000, 20_000), **F32),
    "h200": dict(group_sizes=[100, 150, 50, 0, 212], m=600, target="h200"),
    "h200, swap-AB": dict(group_sizes=[100, 150, 50, 0, 212], preferred_element_type="bfloat16", target="h200"),
    "h200, contraction": dict(group_sizes=[100, 150, 50, 0, 212], form="contraction", target="h200"),
    "v5e": dict(group_sizes=random_sizes(40, 9000), target="v5e"),
    "v6e, contraction": dict(group_sizes=[100, 150, 50, 0, 212], form="contraction", transpose_rhs=False, target="v6e"),
}  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_small_text():
    assert show([3, 0, 5], m=12, **F32).text().splitlines() == [
        "rows     0  1  2 │  3  4  5  6 │  7 │  8  9 10 11",
        "group    0  0  0 │  2  2  2  2 │  2 │  ·  ·  ·  ·",
        "tiles   group 0: 0-3; group 2: 3-6, 7-10",
        "total   3 tiles of 4 rows, 8 of 12 rows owned, 1 empty group, 33% waste",
        "backend xla on cpu: rows m=12 k=1024 n=1024 g=3: float32 x float32 -> float32",
    ]


def test_large_text():
    assert show([100, 150, 50, 0, 212], m=600, target="h200").text().splitlines() == [
        "rows    a character is 2 rows, ╵ starts a tile",
        "     0  " + "0" * 50 + "1" * 22,
        "        ╵" + " " * 49 + "╵",
        "   144  " + "1" * 53 + "2" * 19,
        "        " + " " * 40 + "╵" + " " * 12 + "╵",
        "   288  " + "2" * 6 + "4" * 66,
        "        " + " " * 6 + "╵" + " " * 61 + "╵",
        "   432  " + "4" * 40 + "·" * 32,
        "   576  " + "·" * 12,
        "tiles   4 of 128, 2 of 64 rows",
        "unowned 88 rows, marked ·",
        "empty   group 3",
        "sizes   0  ███████████████████████ 100",
        "        1  ██████████████████████████████████ 150",
        "        2  ███████████ 50",
        "        3  0",
        "        4  ████████████████████████████████████████████████ 212",
        "total   6 tiles of 64 to 128 rows, 512 of 600 rows owned, 1 empty group, 20% waste",
        "backend gpu on cuda (NVIDIA H200): rows m=600 k=1024 n=1024 g=5: bfloat16 x",
        "        bfloat16 -> float32",
    ]


@pytest.mark.parametrize("target", ["cpu", "h200", "v4", "v5e", "v5p", "v6e", "v7x", "cuda", "tpu", "rocm"])
@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_the_tiles_are_those_of_the_planned_backend(target, form):
    """The picture names the backend that the plan chooses, and no tile is taller than its tiling allows."""
    picture = show([100, 0, 150, 50], m=400, k=512, n=256, target=target, form=form)
    rhs = (4, 512, 256) if form == "rows" else (400, 256)
    lhs = (400, 512) if form == "rows" else (512, 400)
    problem = problem_of(lhs, rhs, groups=4, dtype=jnp.bfloat16).replace(out=jnp.dtype(jnp.float32))
    chosen = plan(problem.replace(transpose_lhs=False), target_of(target))
    assert f"{chosen.backend} on {target_of(target)}: {form} m=400 k=512 n=256 g=4" in picture.note
    assert max(picture.heights) <= chosen.tiling.m
    assert [row for tile in picture.cells for row in tile.owned] == list(range(300))


def test_every_argument_counts():
    base = dict(group_sizes=[100, 150, 50], m=400, target="h200")
    changes = [
        {}, dict(m=500), dict(k=64), dict(n=64), dict(dtype="float16"), dict(preferred_element_type="bfloat16"),
        dict(form="contraction"), dict(transpose_rhs=True), dict(target="v5e"), dict(group_offset=1),
        dict(num_groups=2), dict(tile=64, target=None),
    ]  # fmt: skip
    assert len({show(**(base | change)).text() for change in changes}) == len(changes)


def test_the_tiles_of_two_backends():
    sizes = [37, 0, 300]
    bounds = [(0, 37), (37, 37), (37, 337)]
    problem = problem_of((337, 1024), (3, 1024, 1024), dtype=jnp.float32)
    cells = [(tile.rows, tile.owned) for tile in show(sizes, **F32).cells]
    tiles = plan(problem, target_of("cpu")).layout
    assert cells == [tuple(t) for bound in bounds for t in xla.row_tiles(problem, tiles, *bound)]
    from trencadis.backends.gpu.choose import choose
    from trencadis.core.devices import CARDS

    layout = choose(problem, CARDS["h200"])
    cells = [(tile.rows, tile.owned) for tile in show(sizes, dtype="float32", target="h200").cells]
    assert cells == [tuple(t) for bound in bounds for t in tile_scheduler.row_tiles(problem, layout, *bound)]


@each_case
def test_numbers_add_up(case):
    picture = show(**case)
    sizes, first = case["group_sizes"], case.get("group_offset", 0)
    local = case.get("num_groups", len(sizes) - first)
    assert isinstance(picture, Mosaic) and not isinstance(picture, Raster)
    assert picture.owned == sum(sizes[first : first + local]) and picture.owned + picture.unowned == picture.m
    if case.get("n") != 0:
        start = sum(sizes[:first])
        owned = [row for tile in picture.cells for row in tile.owned]
        assert owned == list(range(start, start + picture.owned))
    assert all(
        sum(sizes[: t.group]) <= t.owned.start < t.owned.stop <= sum(sizes[: t.group + 1]) for t in picture.cells
    )
    assert picture.computed == sum(picture.heights) == sum(h * n for h, n in picture.heights_count.items())
    assert picture.waste == pytest.approx(1 - picture.owned / picture.computed if picture.computed else 0)
    assert picture.empty == tuple(g for g in range(first, first + local) if sizes[g] == 0)


@each_case
def test_every_tile_is_drawn_once_in_the_picture(case):
    picture = show(**case)
    root = ElementTree.fromstring(picture.svg())
    tiles = [path for path in root.iter(f"{SVG}path") if path.get("class") == "tile"]
    assert len(tiles) == len(picture.cells)
    told = [tuple(map(int, re.findall(r"\d+", path.findtext(f"{SVG}title")))) for path in tiles]
    rows = [(t.group, t.owned.start, t.owned.stop - 1, t.rows.start, t.rows.stop - 1) for t in picture.cells]
    assert told == rows
    pale = sum(path.get("class") == "wasted" for path in root.iter(f"{SVG}path"))
    assert pale == sum(len(tile.rows) > len(tile.owned) for tile in picture.cells)
    hatched = sum(path.get("class") == "unowned" for path in root.iter(f"{SVG}path"))
    assert (hatched > 0) == (picture.unowned > 0)
    words = " ".join(text.text for text in root.iter(f"{SVG}text"))
    assert f"backend {picture.note}" in words


@each_case
def test_picture_lies_inside_its_frame(case):
    root = ElementTree.fromstring(show(**case).svg())
    _, _, width, height = map(float, root.get("viewBox").split())
    for element in root.iter():
        if element.tag in (f"{SVG}text", f"{SVG}rect") and element.get("x"):
            assert 0 <= float(element.get("x")) <= width
            assert 0 <= float(element.get("y")) <= height
        if element.tag == f"{SVG}path" and element.get("class") in ("tile", "wasted", "unowned"):
            left = float(re.match(r"M([\d.-]+) ", element.get("d"))[1])
            assert 30 <= left <= width - 30


@each_case
@pytest.mark.parametrize("width", [30, 80, 200])
def test_text_stays_readable(case, width):
    text = show(**case).text(width)
    body = text[: text.index("\ntotal ")].splitlines()
    assert len(body) <= 40
    assert all(len(line) <= min(max(width, 40), 120) for line in body)
    assert all(line == line.rstrip() for line in body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(group_sizes=[3, -1]), "group_sizes: sizes must be >= 0; group 1 has -1"),
        (dict(group_sizes=[3, 2], m=4), "group_sizes: must sum to at most m = 4 rows; got a sum of 5"),
        (dict(k=-1), "k: want a nonnegative int; got -1"),
        (dict(n=2.5), "n: want a nonnegative int; got 2.5"),
        (dict(dtype="half-precise"), "dtype: want a dtype such as bfloat16 or float32; got 'half-precise'"),
        (dict(preferred_element_type="x"), "preferred_element_type: want a dtype"),
        (dict(form="columns"), "form: want 'rows' or 'contraction'; got 'columns'"),
        (dict(form="contraction", transpose_rhs=True), "transpose_rhs: goes with form 'rows'"),
        (dict(target="h9"), "target: want a Target, a device, or one of 'cpu'"),
        (dict(tile=4, k=8), "k: goes with the tiles of a backend, not with the fixed raster of `tile`"),
        (dict(tile=4, target="cpu"), "target: goes with the tiles of a backend"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        show(**{"group_sizes": [3], **arguments})


def test_traced_sizes_are_refused():
    with pytest.raises(ValueError, match="group_sizes: want values known now"):
        jax.jit(lambda sizes: show(sizes, target="cpu").computed)(jnp.array([1]))


def test_a_huge_picture_shows_as_text_in_a_notebook():
    picture = show([7] * 20_001, target="h200")
    assert picture._repr_svg_() is None
    assert len(str(picture)) < 5000
    assert show([3], target="h200")._repr_svg_() == show([3], target="h200").svg()


@pytest.mark.parametrize("name", ["x.png", "x", "x.svg.pdf"])
def test_only_svg_files_are_written(tmp_path, name):
    with pytest.raises(ValueError, match=r"path: want a file name that ends in \.svg"):
        show([3], tile=4).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_tiles_of_the_reference_are_all_rows():
    problem = problem_of((16, 8), (2, 8, 8))
    (tile,) = BACKENDS["reference"].row_tiles(problem, None, 3, 7)
    assert tile == (range(16), range(3, 7)) and not BACKENDS["reference"].row_tiles(problem, None, 3, 3)
