"""The picture of a grouped GEMM: it says what the library does, and its rectangles are as large as the groups."""

from __future__ import annotations

import io
import itertools
import pathlib
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.cli.show import tensor
from trencadis.cli.sizes import random_sizes
from trencadis.viz import Product, show, show_gemm
from trencadis.viz.panel import Box, Kind

SVG = "{http://www.w3.org/2000/svg}"
IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "img"
SIZES = (3, 0, 5)


def ones(*shape):
    return jnp.asarray(np.ones(shape, np.float32))


X, Y = (GroupedTensor.ragged_rows(ones(10, columns), SIZES) for columns in (4, 6))
W = GroupedTensor.stacked(ones(3, 4, 6))
A = GroupedTensor.from_list([ones(2, 3), ones(4, 1), ones(3, 5)], "both")
B = GroupedTensor.from_list([ones(3, 4), ones(1, 2), ones(5, 3)], "both")
LOOSE = GroupedTensor.fully_ragged(ones(40), [2, 4, 3], [3, 1, 5])
XX = GroupedTensor.ragged_rows(ones(9, 2, 3), SIZES)

CASES = {
    "forward": (X, W, ((1,), (1,))),
    "d x": (Y, W, ((1,), (2,))),
    "d w": (X, Y, ((0,), (0,))),
    "columns": (GroupedTensor.ragged_cols(ones(4, 10), SIZES), W, ((0,), (1,))),
    "n": (W, GroupedTensor.ragged_cols(ones(6, 9), SIZES), ((2,), (0,))),
    "m and n": (X, X, ((1,), (1,))),
    "m and k": (A, GroupedTensor.ragged_rows(ones(9, 2), [3, 1, 5]), ((1,), (0,))),
    "all": (A, B, ((1,), (0,))),
    "unowned entries": (LOOSE, B, ((1,), (0,))),
    "stacks": (W, W, ((1,), (1,))),
    "vectors": (GroupedTensor.stacked(ones(3, 4)), W, ((1,), (1,))),
    "axes": (XX, GroupedTensor.stacked(ones(3, 2, 3, 5)), ((1, 2), (1, 2))),
    "between": (XX, GroupedTensor.stacked(ones(3, 5, 2, 3, 2)), ((1, 2), (2, 3))),
    "nothing": (GroupedTensor.ragged_rows(ones(0, 4), [0, 0, 0]), W, ((1,), (1,))),
    "slender": (tensor([tuple(random_sizes(40, 9000)), 3], 40), tensor([3, 2], 40), ((1,), (1,))),
    "thousands": (tensor([(3, 1, 0, 4) * 500, 8], 2000), tensor([8, 9], 2000), ((1,), (1,))),
    "many": (tensor([(1, 2, 0, 40) * 100, 8], 400), tensor([8, 9], 400), ((1,), (1,))),
}  # fmt: skip
each_case = pytest.mark.parametrize(("lhs", "rhs", "dims"), CASES.values(), ids=CASES)


def drawn(picture):
    """Of lhs, rhs and result the width and height of each group that is drawn; and what is hatched."""
    root = ElementTree.fromstring(picture.svg())
    boxes = {panel.name: {} for panel in picture.panels}
    for rect in root.iter(f"{SVG}rect"):
        place = re.match(r"group (\d+): (\w+)\[", rect.findtext(f"{SVG}title") or "")
        if place:
            boxes[place[2]][int(place[1])] = float(rect.get("width")), float(rect.get("height"))
    return boxes, [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "unowned"]


def test_text_of_a_forward_pass():
    picture = show_gemm(GroupedTensor.ragged_rows(ones(5, 2), [1, 0, 3]), GroupedTensor.stacked(ones(3, 2, 4)),
                   contracting_dims=((1,), (1,)))  # fmt: skip
    assert str(picture) == repr(picture)
    assert picture.text().splitlines() == [
        "lhs      ·  rhs         =  result",
        "[5, Σ2]     [3, Σ2, 4]     [5, 4]",
        "00          0000           0000",
        "22          0000           2222",
        "22                         2222",
        "22          1111           2222",
        "··          1111           ····",
        "",
        "            2222",
        "            2222",
        "",
        "group 0  lhs[0:1] · rhs[0] = result[0:1]   [1, 2] · [2, 4] = [1, 4]",
        "group 1  lhs[1:1] · rhs[1] = result[1:1]   [0, 2] · [2, 4] = [0, 4]   empty",
        "group 2  lhs[1:4] · rhs[2] = result[1:4]   [3, 2] · [2, 4] = [3, 4]",
        "unowned  lhs[4:5], result[4:5], marked ·",
        "total    3 groups, 1 empty, 32 multiply-adds",
    ]


def test_text_of_a_picture_that_is_too_large():
    picture = show_gemm(GroupedTensor.ragged_rows(ones(99, 2), [99]), GroupedTensor.stacked(ones(1, 2, 4)),
                   contracting_dims=((1,), (1,)))  # fmt: skip
    assert picture.text().splitlines() == [
        "group 0  lhs[0:99] · rhs[0] = result[0:99]   [99, 2] · [2, 4] = [99, 4]",
        "picture  too large for text: .save('gemm.svg'), or --svg gemm.svg",
        "total    1 group, 792 multiply-adds",
    ]


def test_text_of_matrices_that_differ_in_all():
    assert show_gemm(A, B, contracting_dims=((1,), (0,))).text().splitlines() == [
        "lhs             ·  rhs           =  result",
        "[25], Σ across     [29], Σ down     [25]",
        "000                0000             0000",
        "000                0000             0000",
        "                   0000",
        "",
        "1                  11               11",
        "1                                   11",
        "1                                   11",
        "1                                   11",
        "",
        "22222              222              222",
        "22222              222              222",
        "22222              222              222",
        "                   222",
        "                   222",
        "",
        "group 0  lhs[0:6] · rhs[0:12] = result[0:8]        [2, 3] · [3, 4] = [2, 4]",
        "group 1  lhs[6:10] · rhs[12:14] = result[8:16]     [4, 1] · [1, 2] = [4, 2]",
        "group 2  lhs[10:25] · rhs[14:29] = result[16:25]   [3, 5] · [5, 3] = [3, 3]",
        "total    3 groups, 77 multiply-adds",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kinds", "equation"),
    [
        ("forward", (Kind.ROWS, Kind.STACK, Kind.ROWS), "lhs[3:8] · rhs[2] = result[3:8]"),
        ("d x", (Kind.ROWS, Kind.STACK, Kind.ROWS), "lhs[3:8] · rhs[2]ᵀ = result[3:8]"),
        ("d w", (Kind.ROWS, Kind.ROWS, Kind.STACK), "lhs[3:8]ᵀ · rhs[3:8] = result[2]"),
        ("columns", (Kind.COLUMNS, Kind.STACK, Kind.ROWS), "lhs[:, 3:8]ᵀ · rhs[2] = result[3:8]"),
        ("n", (Kind.STACK, Kind.COLUMNS, Kind.COLUMNS), "lhs[2] · rhs[:, 3:8] = result[:, 3:8]"),
        ("m and n", (Kind.ROWS, Kind.ROWS, Kind.FLAT), "lhs[3:8] · rhs[3:8]ᵀ = result[9:34]"),
        ("m and k", (Kind.FLAT, Kind.ROWS, Kind.ROWS), "lhs[10:25] · rhs[4:9] = result[6:9]"),
        ("all", (Kind.FLAT, Kind.FLAT, Kind.FLAT), "lhs[10:25] · rhs[14:29] = result[16:25]"),
        ("stacks", (Kind.STACK, Kind.STACK, Kind.STACK), "lhs[2]ᵀ · rhs[2] = result[2]"),
    ],
)
def test_which_multiplies_which(case, kinds, equation):
    lhs, rhs, dims = CASES[case]
    picture = show_gemm(lhs, rhs, contracting_dims=dims)
    assert tuple(panel.kind for panel in picture.panels) == kinds
    assert picture.equation(2) == equation


@pytest.mark.parametrize("case", ["forward", "d x", "d w", "columns", "n", "m and k", "all", "stacks"])
def test_the_equations_hold(case, rng):
    """What the picture says of places is true of numbers: parts indexed so multiply to those of the result."""
    lhs, rhs, dims = CASES[case]
    picture = show_gemm(lhs, rhs, contracting_dims=dims)
    lhs, rhs = (GroupedTensor(jnp.asarray(rng.normal(size=x.shape), jnp.float32), x.first_dims, x.last_dims, x.shape)
                for x in (lhs, rhs))  # fmt: skip
    out = tr.grouped_gemm(lhs, rhs, contracting_dims=dims)
    data = {"lhs": lhs.data, "rhs": rhs.data, "result": out.data if isinstance(out, GroupedTensor) else out}
    for group in picture.local:
        left, right, result = (
            eval(panel.where(group), {}, data).reshape(panel.shape_of(group)) for panel in picture.panels
        )
        flips = [part.endswith("ᵀ") for part in picture.equation(group).split(" = ")[0].split(" · ")]
        left, right = (part.T if flip else part for part, flip in zip((left, right), flips, strict=True))
        np.testing.assert_allclose(left @ right, result, rtol=1e-5, atol=1e-5)


@each_case
def test_the_result_is_that_of_the_library(lhs, rhs, dims):
    picture = show_gemm(lhs, rhs, contracting_dims=dims)
    out = jax.eval_shape(
        lambda x, y: tr.grouped_gemm(
            GroupedTensor(x, lhs.first_dims, lhs.last_dims, lhs.shape),
            GroupedTensor(y, rhs.first_dims, rhs.last_dims, rhs.shape), contracting_dims=dims,
        ), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)),
    )  # fmt: skip
    assert picture.result.shape == out.shape
    ragged = (getattr(out, name, None) is not None for name in ("first_dims", "last_dims"))
    assert tuple(ragged) == (picture.result.first_dims is not None, picture.result.last_dims is not None)


@each_case
def test_rectangles_are_as_large_as_groups(lhs, rhs, dims):
    """In a dimension, wherever it lies, one scale holds."""
    picture = show_gemm(lhs, rhs, contracting_dims=dims)
    boxes, _ = drawn(picture)
    scales = {}
    for panel in picture.panels:
        assert set(boxes[panel.name]) == set(picture.local) - set(picture.empty)
        for group, (width, height) in boxes[panel.name].items():
            box = panel.box(group)
            for role, pixels, entries in ((panel.across, width, box.columns), (panel.down, height, box.rows)):
                if pixels > 0.5:  # nothing is drawn thinner
                    scales.setdefault(role, []).append((pixels / entries, 0.011 / entries))
    for found in scales.values():
        for (one, error), (other, more) in itertools.pairwise(found):
            assert abs(one - other) <= error + more


def test_sizes_by_number():
    boxes, hatched = drawn(show_gemm(X, W, contracting_dims=((1,), (1,))))
    (_, small), (_, large) = boxes["lhs"][0], boxes["lhs"][2]
    assert large / small == pytest.approx(5 / 3, rel=1e-3)
    assert boxes["rhs"][0] == boxes["rhs"][2]
    assert boxes["result"][2][0] / boxes["lhs"][2][0] == pytest.approx(6 / 4, rel=1e-3)
    assert len(hatched) == 2  # of lhs and of the result
    assert [float(rect.get("height")) / small for rect in hatched] == pytest.approx([2 / 3] * 2, rel=1e-3)


def test_empty_groups_are_seen():
    root = ElementTree.fromstring(show_gemm(X, W, contracting_dims=((1,), (1,))).svg())
    kinds = [element.get("class") or "" for element in root.iter()]
    assert kinds.count("empty line") == 2  # where rows of group 1 would be, in lhs and in the result
    assert kinds.count("past line") == 3  # its matrix, the key, and its equation
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("1") == 4 and "an empty group: nothing to multiply" in words


@pytest.mark.parametrize(("case", "marks"), [("forward", 2), ("d x", 2), ("d w", 4), ("all", 2)])
def test_what_is_summed_over_is_marked(case, marks):
    """Along lhs, or its first matrix, and along rhs; along each group where a sum ends with its rows."""
    lhs, rhs, dims = CASES[case]
    root = ElementTree.fromstring(show_gemm(lhs, rhs, contracting_dims=dims).svg())
    assert sum(path.get("class") == "summed line" for path in root.iter(f"{SVG}path")) == marks


def test_unowned_entries_of_a_flat_buffer():
    picture = show_gemm(LOOSE, B, contracting_dims=((1,), (0,)))
    assert picture.lhs.unowned() == [(25, 40)] and "unowned  lhs[25:40]" in picture.text().splitlines()
    assert "lhs[25:40]: unowned" in picture.svg()


def test_a_window():
    local = GroupedTensor.stacked(W.data[2:])
    picture = show_gemm(X, local, contracting_dims=((1,), (1,)), group_offset=2)
    assert picture.local == range(2, 3) and picture.equation(2) == "lhs[3:8] · rhs[0] = result[3:8]"
    assert picture.lhs.unowned() == [(0, 3), (8, 10)]
    assert "total    1 group of 3, 120 multiply-adds" in picture.text()
    picture = show_gemm(X, Y, contracting_dims=((0,), (0,)), group_offset=1)
    assert picture.result.shape == (2, 4, 6) and picture.equation(2) == "lhs[3:8]ᵀ · rhs[3:8] = result[1]"


@each_case
def test_picture_lies_inside_its_frame(lhs, rhs, dims):
    root = ElementTree.fromstring(show_gemm(lhs, rhs, contracting_dims=dims).svg())
    _, _, width, height = map(float, root.get("viewBox").split())
    for element in root.iter():
        if element.tag in (f"{SVG}text", f"{SVG}rect") and element.get("x"):
            x, y, wide, tall = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width and 0 <= y <= y + tall <= height
        if element.tag == f"{SVG}rect" and element.get("width"):
            assert float(element.get("width")) > 0 and float(element.get("height")) > 0


@each_case
@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_stays_readable(lhs, rhs, dims, width):
    lines = show_gemm(lhs, rhs, contracting_dims=dims).text(width).splitlines()
    assert len(lines) <= 50 and all(line == line.rstrip() for line in lines)
    assert all(len(line) <= min(width, 120) for line in lines if "·" not in line)


def test_counts_and_value_semantics(tmp_path):
    picture = show_gemm(X, Y, contracting_dims=((0,), (0,)))
    assert picture.work == 8 * 4 * 6 and picture.empty == (1,) and picture.groups == 3
    assert picture.lhs.box(2) == Box(row=3, column=0, rows=5, columns=4)
    assert picture == show_gemm(X, Y, contracting_dims=((-2,), (-2,))) and isinstance(picture, Product)
    assert picture.save(tmp_path / "x.svg").read_text(encoding="utf-8") == picture.svg() == picture._repr_svg_()
    assert (
        show_gemm(tensor([(1,) * 2000, 2], 2000), tensor([2, 2], 2000), contracting_dims=((1,), (1,)))._repr_svg_()
        is None
    )


def test_colours_through_rich():
    from rich import console

    picture = show_gemm(X, W, contracting_dims=((1,), (1,)))
    plain, colourful = io.StringIO(), io.StringIO()
    console.Console(file=plain, width=80).print(picture)
    console.Console(file=colourful, width=80, force_terminal=True, color_system="truecolor").print(picture)
    assert plain.getvalue().rstrip("\n") == picture.text(80)
    assert "\x1b[38;2;255;255;255;48;2;0;114;178m0000" in colourful.getvalue()  # white on the colour of group 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rhs=4), "rhs: want a GroupedTensor, such as GroupedTensor.stacked"),
        (dict(lhs=[3]), "lhs: want a GroupedTensor, such as GroupedTensor.stacked"),
        (dict(lhs=[3], rhs=4), "lhs: want a GroupedTensor"),
        (dict(contracting_dims=None), "contracting_dims: want "),
        (dict(contracting_dims=((1,),)), "contracting_dims: want "),
        (dict(contracting_dims=((1,), (2,))), "contracting_dims: axis 1 of lhs .* want the same size"),
        (dict(group_offset=4), "group_offset: the window"),
        (dict(group_offset=1.5), "group_offset: want an integer"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        show_gemm(**{"lhs": X, "rhs": W, "contracting_dims": ((1,), (1,)), **arguments})


def test_traced_sizes_are_refused():
    def look(sizes):
        show_gemm(GroupedTensor.ragged_rows(ones(10, 4), sizes), W, contracting_dims=((1,), (1,)))

    with pytest.raises(ValueError, match="lhs: want sizes that are known now; got traced ones"):
        jax.jit(look)(jnp.array(SIZES))


def test_numbers_may_be_traced():
    def look(x, w):
        picture = show_gemm(
            GroupedTensor.ragged_rows(x, SIZES), GroupedTensor.stacked(w), contracting_dims=((1,), (1,))
        )
        return jnp.full((), picture.work)

    assert jax.jit(look)(X.data, W.data) == 8 * 4 * 6


# The pictures of the pages: what made each of them.
DRAWN = {
    "mosaic": lambda: show([100, 150, 50, 0, 212], k=4096, n=14336, preferred_element_type=jnp.bfloat16, target="h200"),
    "gemm-forward": lambda: show_gemm(X, W, contracting_dims=((1,), (1,))),
    "gemm-d-x": lambda: show_gemm(Y, W, contracting_dims=((1,), (2,))),
    "gemm-d-w": lambda: show_gemm(X, Y, contracting_dims=((0,), (0,))),
    "gemm-ragged": lambda: show_gemm(A, B, contracting_dims=((1,), (0,))),
}


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_of_the_pages_are_up_to_date(name):
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == DRAWN[name]().svg()
