"""Gated activations and their pullback in the kernel: by value, interpreted, and by the compiler's schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_cases import BIAS, check, forward, numbers, pullback, spoil
from jax.experimental.pallas import tpu as pltpu
from poisoned import rows_problem
from sweep import sweep

from trencadis import inspect as tpu
from trencadis import moe
from trencadis.backends.tpu import plan
from trencadis.backends.tpu.execution import execute
from trencadis.core import autodiff, gated
from trencadis.core.call import Options
from trencadis.core.devices import CHIPS
from trencadis.core.epilogue import Epilogue, Gate
from trencadis.core.plan import Refusal
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.moe import layer

from .ahead import compiled, kernels
from .interpreted import STRICT, boundary_sizes, rows_layout, run

pytestmark = pytest.mark.core

BITS16 = dict(sublane_tile=16, heights=(32, 64))
BF16 = "bf16 bf16 bf16"
V6E = Target(platform="tpu", kind=CHIPS["v6e"].kind)
CASES = {
    # a window; the last column block has one chunk less; m and k are not aligned
    "both kept": (forward(70, 60, 384, 6, local=4), rows_layout(out_buffers=2, lhs_buffers=3)),
    "biases": (
        forward(100, 128, 200, 6, BF16, keep=False, epilogue=BIAS),
        rows_layout(block_n=200, chunk=200, **BITS16),
    ),
    # the last chunk is smaller than the others, and its buffer holds columns that were never copied
    "pullback": (pullback(61, 128, 640, 5, local=3), rows_layout(block_n=512, chunk=256, cores=2)),
    # row tiles start inside of lane vectors of 128 weights
    "pullback, bf16": (
        pullback(200, 130, 200, 6, BF16), rows_layout(block_n=200, chunk=200, sublane_tile=16, heights=(32, 160))
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean():
    """Reset the interpreter, in which an exception may leave state behind for the next test."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.once
@pytest.mark.parametrize("name", sweep(CASES, [name for name in CASES if name != "pullback"]))
def test_equals_float64_with_poison_in_other_groups(name):
    """NaN and Inf in the operands of another group and in unowned rows, which are exactly 0 in every result."""
    problem, layout = CASES[name]
    outside = problem.groups - problem.local_groups
    for i, sizes in enumerate(boundary_sizes(problem, layout.sublane_tile, seed=len(name))):
        first = np.array([(outside, outside // 2, 0, -1, problem.groups - 1, 0)[i] if outside else 0], np.int32)
        lhs, rhs, *rest = operands = spoil(
            problem, sizes, first, numbers(problem, i), i % problem.local_groups, (np.nan, np.inf)[i % 2]
        )
        check(problem, sizes, first, operands, run(problem, layout, lhs, rhs, sizes, first, *rest))


@pytest.mark.parametrize("problem", [forward(40, 128, 20, 3, epilogue=BIAS), pullback(40, 20, 128, 3)], ids=str)
def test_weights_are_read_in_the_order_in_which_tpus_store_them(problem):
    """Both of them are transposed, which costs nothing there."""
    assert plan(problem, V6E, Overrides()).problem.transpose_rhs != problem.transpose_rhs
    lhs, rhs, *rest = numbers(problem, 0)
    operands = (lhs, rhs, np.array([[9, 0, 20]], np.int32), np.zeros(1, np.int32), *rest)
    found = gated.run(problem, Overrides(backend="tpu", interpret=True), *operands)
    for got, want in zip(found, gated.run(problem, Overrides(), *operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
def test_padded_columns_do_not_count():
    """Padding of n is 0 in gate and up, where this activation is not a number."""
    gate = Gate(activation=lambda gate, up: gate / up, pullback=True)
    problem = rows_problem(40, 8, 200, 2, transpose_rhs=True, gate=gate)
    lhs, rhs, z_gate, z_up, weight = numbers(problem, 0)
    operands = (lhs, rhs, np.array([[9, 7]], np.int32), np.zeros(1, np.int32), z_gate, np.abs(z_up) + 1, weight)
    found = execute(problem, problem.replace(n=256), rows_layout(block_n=256), *operands, interpret=STRICT)
    for got, want in zip(found, gated.run(problem, Overrides(), *operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep  # eight interpreted kernels; what they compute one by one is tested above
def test_the_layer_and_its_gradients_through_interpreted_kernels():
    """Values and gradients of all inputs equal those of the layer as XLA operations."""
    t, d, f, e, rng = 9, 10, 6, 3, np.random.default_rng(0)
    x, logits, ct = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((t, d), (t, e), (t, d)))
    routing = moe.route(logits.at[:, 1].set(-100.0), 2, mask=jnp.arange(t) != 3)
    shapes = dict(gate=(e, d, f), up=(e, d, f), down=(e, f, d))
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    indices = layer.Indices(moe.sort_by_expert(routing.experts, e), jnp.zeros((), jnp.int32), layer.Experts())

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(options, x, weights, params):
        described = layer.Layer(activation=moe.swiglu(), dtype=np.dtype("float32"), gated=True, options=options)
        inputs = layer.Inputs(x, weights, layer.Experts(**params))
        out, pull = jax.vjp(lambda inputs: layer.run(described, indices, inputs), inputs)
        return out, pull(ct)

    found, wanted = (
        value_and_gradients(options, x, routing.weights, params)
        for options in (Options(backend="tpu", interpret=True), Options())
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# The plan


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (forward(64, 128, 128, 2, "s8 s8 bf16"), "lhs is int8"),
        (forward(64, 128, 128, 2, epilogue=Epilogue(by_column=True)), "scales"),
        (forward(64, 128, 128, 2, epilogue=Epilogue(accumulate=True)), "existing_out"),
        (forward(64, 128, 128, 2, batch=2), "batch"),
        (rows_problem(64, 128, 128, 2, gate=Gate(activation=lambda a, b: jax.lax.igamma(a, b))), "does not lower"),
    ],
)
def test_refusals(problem, why):
    answer = plan(problem, V6E, Overrides())
    assert isinstance(answer, Refusal) and why in answer.reason


COMPILED = [
    (problem, chip)
    for problem in (forward(512, 384, 640, 3, BF16), pullback(512, 384, 640, 3, BF16))
    for chip in ("v5e", "v5p", "v6e", "v7x")
]


@pytest.mark.parametrize(("problem", "chip"), sweep(COMPILED, COMPILED[::3]), ids=str)
def test_compiles_to_one_kernel(problem, chip):
    fn = functools.partial(gated.run, problem, Overrides(backend="tpu"))
    text = compiled(CHIPS[chip], fn, *problem.operands, *problem.gate_operands)
    assert kernels(text) == ["trencadis_gated_pullback" if problem.gate.pullback else "trencadis_gated"]


FORWARD, PULLBACK = (forward, 2, 3), (pullback, 1, 6)  # products, and matrices that XLA would read and write


@pytest.mark.parametrize(
    ("chip", "kinds"),
    [pytest.param(chip, [FORWARD, PULLBACK], id=chip, marks=pytest.mark.sweep) for chip in ("v5e", "v6e", "v7x")],
)
def test_schedules_are_shorter_than_products_and_the_bytes_of_activations(chip, kinds):
    """Those of a layer together: on v7x the pullback of small experts alone takes longer than its parts."""
    m, d, f, e = 4096, 512, 384, 16
    fused = apart = 0.0
    for make, products, matrices in kinds:
        problem = make(m, d, f, e, BF16)
        fused += seconds(problem, chip)
        apart += products * seconds(problem.replace(gate=None), chip) + matrices * m * f * 2 / CHIPS[chip].hbm
    assert fused < apart


def seconds(problem, chip):
    sizes = np.random.default_rng(0).multinomial(problem.m, np.ones(problem.groups) / problem.groups)
    wanted = problem.operands + ([] if problem.gate is None else problem.gate_operands)
    operands = [jax.ShapeDtypeStruct(*each) for each in wanted]
    operands[2:4] = np.asarray(sizes, np.int32)[None], np.zeros(1, np.int32)
    call = autodiff.run if problem.gate is None else gated.run
    found = tpu.inspect(lambda *xs: call(problem, Overrides(backend="tpu"), *xs), *operands, generation=chip)
    (kernel,) = found.kernels
    assert not kernel.warnings
    return kernel.seconds
