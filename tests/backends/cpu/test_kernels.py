"""Native kernels for CPUs, by value, where panels, tiles and blocks of k begin and end.

`make test-native` compiles and installs them, and then runs the laws of all backends with them too.
"""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gated_cases import BIAS, check, gathered, numbers, pullback, spoil, total, weights
from jax import lax
from scipy import special

import trencadis as tr
from trencadis.backends.cpu import programs
from trencadis.core import arguments, gated
from trencadis.core.decision import Plan
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import gated_answers
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling, Tilings

pytest.importorskip("trencadis_cpu", reason="native kernels are tested by `make test-native`")
bridge = pytest.importorskip("trencadis.backends.cpu.bridge")

SIZES = np.array([530, 3, 0, 1, 13, 70], np.int32)  # more than a tile, few rows, none, panels that are not full
M = 640  # 23 rows are unowned


def drawn(k, n, dtype, seed=0):
    """Rows, weights and a cotangent, with NaN in unowned rows."""
    rng = np.random.default_rng(seed)
    x, w, y = (rng.normal(size=shape).astype(dtype) for shape in ((M, k), (len(SIZES), k, n), (M, n)))
    x[SIZES.sum() :] = y[SIZES.sum() :] = np.nan
    return x, w, y


def step(x, w, y, sizes, **how):
    out, pull = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, sizes, preferred_element_type=x.dtype, **how), x, w)
    return out, *pull(y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k, n", [(1, 1), (259, 33), (40, 531), (515, 129)])
def test_values_and_gradients(k, n, dtype):
    x, w, y = drawn(k, n, jnp.dtype(dtype))
    out, dx, dw = jax.jit(step)(x, w, y, SIZES)
    oracle.check(out, oracle.rows(x, w, SIZES))
    oracle.check(dx, oracle.rows(y, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, y, SIZES))


@pytest.mark.parametrize("tiling", [(2, 7, 64), (100, 256, 40), (1, 1, 1)])
def test_tiles_change_no_bit_of_rows_of_one_block(tiling):
    """Few rows have a kernel of their own, which must not look beyond its tile; k of one block is summed in order."""
    x, w, _ = drawn(24, 70, np.float32)
    op = functools.partial(tr.grouped_matmul, backend="cpu")
    for transpose in (False, True):
        weights = np.ascontiguousarray(w.swapaxes(1, 2)) if transpose else w
        got = op(x, weights, SIZES, transpose_rhs=transpose, tiling=tiling)
        oracle.check(got, oracle.rows(x, w, SIZES))
        want = op(x, weights, SIZES, transpose_rhs=transpose, tiling=(512, tiling[1], 512))
        np.testing.assert_array_equal(got, want)


GATED = {
    "forward": gathered(700, 160, 136, 6, local=5, epilogue=BIAS),
    "bf16": gathered(700, 160, 136, 6, "bf16 bf16 bf16", local=5),
    "pullback": pullback(700, 160, 136, 6, local=5, k=2),
    "sum": total(700, 160, 136, 6, local=5),
    "weights": weights(700, 160, 136, 6, local=5, pair=True, k=2),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_activations(name):
    """Groups of any number of rows, after rows that no local group owns; a NaN in those."""
    problem, sizes, first = GATED[name], np.array([[3, 261, 0, 85, 22, 300]], np.int32), np.array([1], np.int32)
    lhs, rhs, *rest = operands = spoil(problem, sizes, first, numbers(problem, 2), 3, np.nan)
    got = gated.run(problem, Overrides(backend="cpu"), lhs, rhs, sizes, first, *rest)
    check(problem, sizes, first, operands, got)


def test_the_sum_of_two_products_is_rounded_once():
    """In bfloat16 two products that cancel leave nothing; what was rounded in between would be left."""
    problem = total(700, 160, 136, 6, "bf16 bf16 bf16", local=5)
    sizes, first = np.array([[3, 261, 0, 85, 22, 300]], np.int32), np.array([1], np.int32)
    lhs, rhs, *_ = numbers(problem, 2)
    (got,) = gated.run(problem, Overrides(backend="cpu"), lhs, rhs, sizes, first, -lhs, rhs)
    assert not np.any(np.asarray(got, np.float32))


def test_the_sums_of_rows_without_columns_are_zero():
    """They are written all the same: the memory of a result holds what was there before."""
    problem, sizes, first = pullback(700, 160, 0, 6), np.array([[3, 261, 0, 85, 22, 300]]), np.zeros(1, np.int32)
    operands = numbers(problem, 2)
    step = jax.jit(functools.partial(gated.run, problem, Overrides(backend="cpu")))
    for _ in range(8):
        before = [jnp.full((700,), np.nan).block_until_ready() for _ in range(8)]
        del before
        *_, d_weight = step(*operands[:2], sizes, first, *operands[2:])
        assert not np.any(d_weight)


def test_tiles_change_no_bit_of_a_gated_activation():
    """The sums over the columns of each row are those of chunks of columns, whatever the tiles."""
    problem, sizes, first = GATED["pullback"], np.array([[3, 261, 0, 85, 22, 300]], np.int32), np.array([1], np.int32)
    lhs, rhs, *rest = numbers(problem, 2)
    results = []
    for tile in ((512, 256, 512), (7, 256, 64), (100, 256, 100)):
        overrides = Overrides(backend="cpu", tilings=Tilings(forward=Tiling(*tile)))
        results.append(gated.run(problem, overrides, lhs, rhs, sizes, first, *rest))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


# functions of one number, by what they are in float64; values are compared in units of the last place
FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "expm1": (jnp.expm1, np.expm1),
    "log": (jnp.log, np.log),
    "log1p": (jnp.log1p, np.log1p),
    "tanh": (jnp.tanh, np.tanh),
    "sigmoid": (jax.nn.sigmoid, special.expit),
    "erf": (lax.erf, special.erf),
    "erfc": (lax.erfc, special.erfc),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x)),
    "power": (lambda x: x**-3, lambda x: x**-3.0),
    "clip": (lambda x: jnp.clip(x, -1.5, 2.5), lambda x: np.clip(x, -1.5, 2.5)),
    "sign": (jnp.sign, np.sign),
    "ranges": (
        lambda x: jnp.where((x > -1) & ~(x >= 2) | (x == 7), x, 1.0),
        lambda x: np.where((x > -1) & (x < 2) | (x == 7), x, 1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_to_the_last_places(name):
    """Over all magnitudes but denormal numbers, which are 0 for XLA, too; infinities and NaN are where they belong."""
    function, exact = FUNCTIONS[name]
    large = np.logspace(-36, 36, 200)
    near, far = np.linspace(-3, 3, 3001), np.linspace(-110, 110, 3001)
    x = np.concatenate([near, far, large, -large, [0.0, np.inf, -np.inf, np.nan]])
    x = x.astype(np.float32)
    got = tr.grouped_matmul(x[:, None], jnp.ones((1, 1, 1)), [len(x)], activation=function, backend="cpu")[:, 0]
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
        want = np.where(np.abs(want) < 1e-37, 0, want).astype(np.float32)
        got = np.where(np.abs(got) < 1e-37, 0, got)
    np.testing.assert_array_max_ulp(got[np.isfinite(want)], want[np.isfinite(want)], maxulp=6)
    np.testing.assert_array_equal(got[~np.isfinite(want)], want[~np.isfinite(want)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [jax.nn.gelu, jnp.sin], ids=["in the kernel", "in XLA"])
def test_activations(activation, dtype):
    """With a bias, over a batch, and their gradients: what has no operation in the kernel is applied by XLA."""
    x, w, y = drawn(24, 70, jnp.dtype(dtype))
    bias = np.random.default_rng(1).normal(size=(len(SIZES), 70)).astype(np.float32)
    x, y, sizes = np.stack([x, x[::-1]]), np.stack([y, y]), np.stack([SIZES, np.roll(SIZES, 2)])
    x, y = np.nan_to_num(x), np.nan_to_num(y)

    def value(backend, x, w, bias):
        op = functools.partial(
            tr.grouped_matmul, activation=activation, preferred_element_type=x.dtype, backend=backend
        )
        return jax.vmap(lambda x, sizes: op(x, w, sizes, bias=bias))(x, sizes)

    def step(backend, *args):
        out, pull = jax.vjp(functools.partial(value, backend), *args)
        return out, *pull(y)

    got, want = (jax.jit(step, static_argnums=0)(backend, x, w, bias) for backend in ("cpu", "reference"))
    for mine, other in zip(got, want, strict=True):
        oracle.check(mine, np.asarray(other, np.float64))
    alone = tr.why(lambda x, w: tr.grouped_matmul(x, w, SIZES, activation=activation), x[0], w)
    assert ("then sin in XLA" in str(alone)) is (activation is jnp.sin)


def test_an_activation_of_empty_sums_is_that_of_the_bias():
    bias = np.array([[1.0, -2.0], [3.0, -4.0]], np.float32)
    op = functools.partial(tr.grouped_matmul, bias=bias, activation=jax.nn.relu, backend="cpu")
    got = op(jnp.ones((4, 0)), jnp.ones((2, 0, 2)), [1, 2])
    np.testing.assert_array_equal(got, [[1, 0], [3, 0], [3, 0], [0, 0]])


def test_a_gated_activation_with_other_operations_is_left_to_xla():
    problem = GATED["forward"]
    gate = dataclasses.replace(problem.gate, activation=lambda gate, up: jnp.sin(gate) * up)
    answers = gated_answers(problem.replace(gate=gate), Target(platform="cpu"), Overrides())
    assert "has operations that the cpu backend lacks" in answers["cpu"].reason and isinstance(answers["xla"], Plan)


def test_a_layer_of_experts():
    """Values and all gradients are those of the reference, whose products are loops in XLA."""
    rng = np.random.default_rng(3)
    shapes = ((40, 16), (4, 16, 24), (4, 16, 24), (4, 24, 16), (40, 4))
    given = [rng.normal(size=shape, scale=0.3).astype(np.float32) for shape in shapes]

    def loss(backend, x, gate, up, down, logits):
        return jnp.sum(jnp.sin(tr.moe_mlp(x, tr.moe.route(logits, 2), gate, up, down, backend=backend)))

    step = jax.jit(jax.value_and_grad(loss, range(1, 6)), static_argnums=0)
    got, want = (step(backend, *given) for backend in ("cpu", "reference"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_product_is_one_custom_call():
    """No loops, and no temporary but what the program itself has."""
    x, w, y = drawn(24, 70, np.float32)
    text = jax.jit(step).lower(x, w, y, SIZES).compile().as_text()
    assert text.count('custom_call_target="trencadis_grouped"') == 3
    assert "while" not in text


def test_results_do_not_depend_on_threads():
    """Several programs at a time, each of which uses all threads of XLA, and each result is that of one alone."""
    x, w, y = drawn(300, 200, np.float32)
    f = jax.jit(step)
    want = [np.asarray(each) for each in f(x, w, y, SIZES)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda _: jax.block_until_ready(f(x, w, y, SIZES)), range(24)):
            for got, each in zip(found, want, strict=True):
                np.testing.assert_array_equal(got, each)


def test_an_exported_program_has_no_native_kernels():
    x, w, y = drawn(24, 70, np.float32)
    exported = jax.export.export(jax.jit(step))(x, w, y, SIZES)
    assert "trencadis_grouped" not in exported.mlir_module()
    for got, want in zip(exported.call(x, w, y, SIZES), jax.jit(step)(x, w, y, SIZES), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_an_error_names_what_is_wrong():
    """A custom call with buffers that do not match is refused, and touches none of them."""
    out = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    options = dict(contraction=False, transpose_lhs=False, transpose_rhs=False, bias=False, accumulate=False)
    counts = dict(gather=np.int64(0), rows=np.int64(4), local=np.int64(1), tile=np.array([8, 8, 8], np.int64))
    call = jax.ffi.ffi_call("trencadis_grouped", out)
    with pytest.raises(jax.errors.JaxRuntimeError, match="trencadis_cpu: shapes do not match"):
        call(jnp.ones((4, 5)), jnp.ones((1, 6, 3)), jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32),
             **options, **counts).block_until_ready()  # fmt: skip


def test_a_program_that_is_not_valid_is_refused():
    """A register that is not there would be memory of another."""
    relu = programs.of_activation(jax.nn.relu)
    wrong = dataclasses.replace(relu, code=((0, 2, 0, 9, 0),))
    problem = arguments.rows_problem(
        jnp.ones((4, 5)), jnp.ones((1, 5, 3)), jnp.ones(1, jnp.int32), jnp.float32,
        transpose_rhs=False, epilogue=Epilogue(), precision=None,
    )  # fmt: skip
    operands = jnp.ones((4, 5)), jnp.ones((1, 5, 3)), jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the program of the epilogue is not valid"):
        bridge.fused(problem, Tiling(8, 8, 8), wrong, operands)[0].block_until_ready()


@pytest.mark.parametrize("sizes", [
    [[3, -2, 5], [4, 4, 4], [2, 3, 1]], [[9, 9, 9], [40, 1, 7], [2, 30, 1]], [[0, 2, 0], [0, 0, 5], [3, 0, 2]],
])  # fmt: skip
def test_sizes_that_do_not_fit_a_ragged_gemm_leave_its_buffers_alone(sizes):
    """Traced sizes may be anything: what lies in its array is multiplied, and nothing else is read or written."""
    m, k, n = (jnp.array(each, jnp.int32) for each in sizes)

    @jax.jit
    def f(x, y, m, k, n):
        lhs = tr.GroupedTensor(x, m, k, x.shape)
        rhs = tr.GroupedTensor(y, k, n, y.shape)
        out = tr.GroupedTensor(jnp.zeros(64), m, n, (64,))
        return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=out).data

    got = f(jnp.ones(64), jnp.ones(64), m, k, n)
    assert got.shape == (64,) and np.isfinite(got).all()
