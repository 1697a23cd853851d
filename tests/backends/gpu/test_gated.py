"""Gated activations, their pullback and the gradient of rows in the kernel: by value, interpreted, and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_cases import BIAS, check, forward, gathered, numbers, pullback, spoil, total, weights
from poisoned import rows_problem
from sweep import sweep

import trencadis as tr
from trencadis import moe
from trencadis.backends.gpu import plan
from trencadis.core import gated
from trencadis.core.call import Options
from trencadis.core.devices import CARDS
from trencadis.core.epilogue import Epilogue, Gate
from trencadis.core.plan import Plan, Refusal
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.moe import layer

from .ahead import kernels, structs
from .interpreted import kernel, layout_of, tricky

# the interpreter multiplies in numpy, which warns of Inf times zero; as an error, that would end one of its threads
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

BF16, F16 = "bf16 bf16 bf16", "f16 f16 f16"
H200 = Target(platform="cuda", kind=CARDS["h200"].kind)
GATED = dict(swap_ab=True, gated=True, block_m=96, store_buffers=1)
PULLBACK = dict(swap_ab=True, block_m=96, block_n=256, epilogue_steps=4, store_buffers=1, stages=3)
CASES = {
    # a window; two columns of tiles, the last narrower; m and k are multiples of nothing
    "forward": (forward(203, 100, 136, 6, BF16, local=4, keep=False), GATED),
    "both kept, biases": (forward(203, 100, 200, 6, BF16, local=4, epilogue=BIAS), GATED),
    "both kept, stored [n, k]": (forward(140, 70, 72, 6, F16, transpose_rhs=True), {**GATED, "num_ctas": 1}),
    # tokens with one row, and with three; more steps than stages
    "rows gathered": (gathered(203, 200, 136, 6, BF16, local=4, keep=False, k=1), GATED),
    "rows gathered, both kept, biases": (gathered(201, 100, 200, 6, BF16, local=4, epilogue=BIAS, k=3), GATED),
    # columns that only align copies; a consumer without columns
    "pullback": (pullback(203, 100, 264, 6, BF16, local=4), PULLBACK),
    # consumers with one block, and steps for blocks that are not there
    "pullback, narrow": (pullback(140, 64, 72, 6, F16), {**PULLBACK, "stages": 2, "num_ctas": 1}),
    # tokens with two rows; three steps of the sum before those of the epilogue
    "pullback, rows gathered": (pullback(202, 180, 264, 6, BF16, local=4, k=2), PULLBACK),
    # blocks of columns outside of the array, in both operands; a step with rows of three groups
    "weights, lhs gathered": (weights(201, 136, 200, 6, BF16, local=4, k=3, pair=True), {"two_results": True}),
    "weights, rhs gathered": (weights(202, 72, 200, 6, "f16 f16 f32", local=4, k=2, operand="rhs"), {"stages": 3}),
    "two weights": (weights(140, 70, 72, 6, BF16, pair=True), {"two_results": True, "num_ctas": 1}),
    "sum": (total(203, 100, 136, 6, BF16, local=4), {"pairs": True}),
    "sum, swap-AB": (total(140, 70, 72, 6, F16), {**GATED, "gated": False, "pairs": True}),
}
DEFAULT = ["both kept, biases", "sum"]  # the layer below has a pullback, and gathered rows


def close(got, want):
    """Equal to the rounding of bfloat16; the composition rounds d h as well, which is summed over n."""
    got, want = (np.asarray(each, np.float32) for each in (got, want))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max(initial=1))


@pytest.mark.parametrize("name", sweep(CASES, DEFAULT))
def test_equals_float64_with_poison_in_other_groups(name):
    """NaN and Inf in the operands of another group and in unowned rows, which are exactly 0 in every result."""
    problem, changes = CASES[name]
    outside, run = problem.groups - problem.local_groups, kernel(problem, layout_of(problem, **changes))
    for i, sizes in enumerate(tricky(problem, seed=len(name))):
        first = np.array([(outside, outside // 2, 0, -1, problem.groups - 1, 0, 1)[i] if outside else 0], np.int32)
        lhs, rhs, *rest = operands = spoil(
            problem, sizes, first, numbers(problem, i), i % problem.local_groups, (np.nan, np.inf)[i % 2]
        )
        check(problem, sizes, first, operands, [np.asarray(x) for x in run(lhs, rhs, sizes, first, *rest)])


@pytest.mark.sweep
def test_padded_columns_do_not_count():
    """Padding of n is 0 in gate and up, where this activation is not a number."""
    gate = Gate(activation=lambda gate, up: gate / up, pullback=True)
    problem = rows_problem(20, 8, 40, 2, BF16, transpose_rhs=True, gate=gate)
    lhs, rhs, z_gate, z_up, weight = numbers(problem, 0)
    operands = (lhs, rhs, np.array([[9, 7]], np.int32), np.zeros(1, np.int32), z_gate, np.abs(z_up) + 1, weight)
    found = kernel(problem, layout_of(problem, **PULLBACK))(*operands)
    for got, want in zip(found, gated.run(problem, Overrides(), *operands), strict=True):
        close(got, want)


@pytest.mark.once
def test_the_layer_and_its_gradients_through_interpreted_kernels():
    """Values and gradients of all inputs equal those of the layer as XLA operations, to the rounding of bfloat16."""
    t, d, f, e, rng = 12, 10, 6, 3, np.random.default_rng(0)
    x, ct = (jnp.asarray(rng.normal(size=(t, d)), jnp.bfloat16) for _ in range(2))
    logits = jnp.asarray(rng.normal(size=(t, e)), jnp.float32)
    routing = moe.route(logits.at[:, 1].set(-100.0), 2, mask=jnp.arange(t) != 3)
    shapes = dict(gate=(e, d, f), up=(e, d, f), down=(e, f, d))
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    indices = layer.Indices(moe.sort_by_expert(routing.experts, e), jnp.zeros((), jnp.int32), layer.Experts())

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(options, x, weights, params):
        described = layer.Layer(activation=moe.swiglu(), dtype=np.dtype(jnp.bfloat16), gated=True, options=options)
        inputs = layer.Inputs(x, weights, layer.Experts(**params))
        out, pull = jax.vjp(lambda inputs: layer.run(described, indices, inputs), inputs)
        return out, pull(ct)

    found, wanted = (
        value_and_gradients(options, x, routing.weights, params)
        for options in (Options(backend="gpu", interpret=True), Options())
    )
    jax.tree.map(close, found, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# The plan, and what a program is lowered to


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (forward(64, 128, 128, 2), "not of 16 bits"),
        (forward(64, 128, 128, 2, "bf16 f16 bf16"), "two dtypes"),
        (forward(64, 128, 128, 2, BF16, epilogue=Epilogue(by_column=True)), "scales"),
        (forward(64, 128, 128, 2, BF16, epilogue=Epilogue(accumulate=True)), "existing_out"),
        (forward(64, 128, 128, 2, BF16, batch=2), "batch"),
        (gathered(2**21, 2048, 128, 2, BF16, k=1), "32 bits"),
        (weights(64, 128, 128, 2, BF16, pair=True, k=2, operand="rhs"), "two operands"),
        (weights(256, 128, 128, 2, BF16, k=2), "so short"),
        (pullback(64, 128, 128, 2, BF16).replace(transpose_rhs=False), "not stored"),
        (rows_problem(64, 64, 64, 2, BF16, gate=Gate(activation=lambda a, b: jax.lax.igamma(a, b))), "does not lower"),
    ],
)
def test_refusals(problem, why):
    answer = plan(problem, H200, Overrides())
    assert isinstance(answer, Refusal) and why in answer.reason


@pytest.mark.parametrize("kind", [gathered, functools.partial(pullback, k=2), functools.partial(weights, k=2)])
def test_the_kernel_gathers_rows(kind):
    problem = kind(512, 64, 64, 2, BF16)
    answer = plan(problem, H200, Overrides())
    assert isinstance(answer, Plan) and answer.problem.gather == problem.gather


@pytest.mark.parametrize(
    "activation", [moe.swiglu(7.0, 1.702, 1.0), lambda gate, up: jax.nn.gelu(gate) * up], ids=["swiglu", "gelu"]
)
@pytest.mark.parametrize("back", [False, True])
def test_activations_lower(activation, back):
    gate = Gate(activation=activation, pullback=back)
    assert isinstance(plan(rows_problem(512, 64, 64, 2, BF16, transpose_rhs=True, gate=gate), H200, Overrides()), Plan)


def test_a_step_of_a_layer_is_six_kernels():
    """Two forward and four backward; equal kernels are lowered once: those of the gradients of gate and up are."""
    t, k, d, f, e = 511, 4, 256, 384, 16  # t * k is not a multiple of 8, as TMA wants it

    def forward(x, router, *weights):
        return tr.moe_mlp(x, moe.route((x @ router).astype(jnp.float32), k), *weights)

    def step(*args):
        out, pull = jax.vjp(forward, *args)
        return out, *pull(out)

    shapes = [(t, d), (d, e), (e, d, f), (e, d, f), (e, f, d)]
    with tr.target("h200"):
        traced = jax.jit(step).trace(*structs(*((shape, "bfloat16") for shape in shapes)))
        assert kernels(traced.lower(lowering_platforms=("cuda",)).as_text()) == 6
