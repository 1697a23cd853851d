"""Recipes: checked when they are built, formats by name or dtype, and the blocks that each operand gets."""

import jax
import jax.numpy as jnp
import pytest

from trencadis.quant import FORMATS, Recipe, Scaled

pytestmark = pytest.mark.core

X, W = jnp.ones((8, 64)), jnp.ones((2, 64, 4))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Recipe(("int8", "colum")), ValueError, "lhs: granularity: want one of tensor, .*; got 'colum'"),
        (lambda: Recipe(rhs=("int8", "colum")), ValueError, "rhs: granularity: .*; got 'colum'"),
        (lambda: Recipe(rhs=("int8", (1, 128))), ValueError, r"rhs: granularity: want 3 lengths .*; got \(1, 128\)"),
        (lambda: Recipe(grad=("int8", (1, -1))), ValueError, r"grad: granularity: want 2 lengths .*; got \(1, -1\)"),
        (lambda: Recipe(("int8", 5)), ValueError, "lhs: granularity: want 2 lengths .*; got 5"),
        (lambda: Recipe(("mxfp8", "row")), ValueError, "lhs: granularity: mxfp8 has blocks of 32 .*; got 'row'"),
        (lambda: Recipe("int7"), ValueError, "lhs: format: want one of int8, .*; got 'int7'"),
        (lambda: Recipe(rhs=jnp.float8_e8m0fnu), ValueError, "rhs: format: want one of int8, .*; got .*float8_e8m0fnu"),
        (lambda: Recipe(rhs=(None, "row")), ValueError, "rhs: format: want one of int8, .*; got None"),
        (lambda: Recipe(grad=("int8",)), TypeError, "grad: want None, a format, or a pair"),
        (lambda: Recipe(grad=True), TypeError, "grad: want None, a format, or a pair"),
    ],
)
def test_mistakes_are_named_when_it_is_built(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_formats_are_kept_by_name():
    """So that recipes that mean the same are equal, hashable and print alike."""
    named = Recipe("int8", ("float8_e4m3fn", (1, 16, 4)), "float8_e5m2")
    typed = Recipe(jnp.int8, [jnp.float8_e4m3fn, [1, 16, 4]], jnp.dtype(jnp.float8_e5m2))
    assert named == typed and hash(named) == hash(typed)
    assert repr(typed) == "Recipe(lhs='int8', rhs=('float8_e4m3fn', (1, 16, 4)), grad='float8_e5m2')"
    assert Recipe(FORMATS["mxfp8"]).lhs == "mxfp8"


@pytest.mark.parametrize(
    ("format", "rows", "columns"),
    [("int8", (1, 64), (1, 64, 1)), ("mxfp8", (1, 32), (1, 32, 1)), ("nvfp4", (1, 16), (1, 16, 1))],
)
def test_scales_run_along_the_contracted_axis_by_default(format, rows, columns):
    recipe = Recipe(format, format, format)
    made = jax.eval_shape(lambda: (recipe.rows(X), recipe.weights(W), recipe.gradient(X)))
    assert [q.block for q in made] == [rows, columns, rows]
    assert {q.format for q in made} == {format}
    kind = recipe.summed
    assert (kind.name, kind.scales, kind.block, kind.total) == (format, jnp.float32, 0, False)


def test_what_has_no_format_stays_as_it_is():
    recipe = Recipe(rhs=("int4", "group"))
    assert recipe.rows(X) is X and recipe.gradient(X) is X
    q = jax.eval_shape(recipe.weights, W)
    assert isinstance(q, Scaled) and q.block == (1, 64, 4)


def test_the_calibration_can_be_changed():
    class Clipped(Recipe):
        def bound(self, name, absmax):
            return absmax / 2 if name == "lhs" else absmax

    recipe = Clipped("int8", "int8")
    row = jnp.array([[127.0, -20.0]])
    assert recipe.rows(row).values.tolist() == [[127, -40]]  # the first saturates
    assert recipe.weights(row.mT[None]).values.ravel().tolist() == [127, -20]
