"""Gated activations as a composition: their meaning, transforms, cost, and how they are planned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_cases import BIAS, check, forward, gathered, numbers, pullback, spoil, total, weights
from jax.test_util import check_grads

from trencadis.core import gated
from trencadis.core.cost import cost
from trencadis.core.devices import CARDS
from trencadis.core.plan import gated_plan, plan
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.why import why

pytestmark = pytest.mark.core

FIRST = np.array([1], np.int32)  # a window that leaves out the first group
SIZES = np.array([[2, 3, 0, 5]], np.int32)
CASES = {
    "forward": forward(12, 5, 6, 4, keep=False),
    "both kept": forward(12, 5, 6, 4, local=3, epilogue=BIAS),
    "rows gathered": gathered(12, 5, 6, 4, local=3, epilogue=BIAS),
    "bf16": forward(12, 5, 6, 4, "bf16 bf16 bf16", local=3),
    "pullback": pullback(12, 5, 6, 4, local=3),
    "pullback, rows gathered": pullback(12, 5, 6, 4, local=3, k=2),
    "sum": total(12, 5, 6, 4, local=3),
    "weights": weights(12, 5, 6, 4, local=3, pair=True, k=2),
    "weights, rhs gathered": weights(12, 5, 6, 4, local=3, k=2, operand="rhs"),
}


def run(problem, operands, sizes=SIZES, first=FIRST, how=Overrides()):
    lhs, rhs, *rest = operands
    return gated.run(problem, how, lhs, rhs, sizes, first, *rest)


@pytest.mark.parametrize("name", CASES)
def test_equals_float64_with_poison_in_another_group(name):
    problem = CASES[name]
    operands = spoil(problem, SIZES, FIRST, numbers(problem, 0), 2, np.nan)
    check(problem, SIZES, FIRST, operands, run(problem, operands))


@pytest.mark.parametrize("name", ["both kept", "pullback", "sum", "weights"])
def test_derivatives_and_batches(name):
    problem = CASES[name].of_rows
    operands = [jnp.asarray(each) for each in numbers(problem, 1)]
    check_grads(lambda *xs: run(problem, xs), operands, order=1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)
    shifted = [jnp.stack([each, each[::-1]]) for each in operands]
    together = jax.vmap(lambda *xs: run(problem, xs))(*shifted)
    apart = [run(problem, [each[i] for each in shifted]) for i in range(2)]
    for got, *want in zip(together, *apart, strict=True):
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rows gathered", "weights, rhs gathered"])
def test_derivatives_and_batches_of_gathered_rows(name):
    """They are those of the composition: a gather, and its transpose without a scatter, before the product."""
    problem = CASES[name]
    *floats, token, inverse = map(jnp.asarray, numbers(problem, 1))

    def outs(*floats):
        return run(problem, (*floats, token, inverse))

    check_grads(outs, floats, order=1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)
    gradients = jax.make_jaxpr(lambda *floats: jax.vjp(outs, *floats)[1](outs(*floats)))(*floats)
    assert "scatter" not in str(gradients)
    shifted = [jnp.stack([each, each[::-1]]) for each in floats]
    for got, *want in zip(jax.vmap(outs)(*shifted), *(outs(*(x[i] for x in shifted)) for i in range(2)), strict=True):
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-5, atol=1e-5)


def test_cost_counts_all_operands_and_results():
    for problem, products in ((CASES["forward"], 2), (CASES["both kept"].replace(epilogue=BIAS), 2)):
        assert cost(problem).flops == products * cost(problem.replace(gate=None)).flops
    for name in ("forward", "bf16", "pullback", "sum", "weights"):
        problem = CASES[name].of_rows
        arrays = [*problem.operands[:2], *problem.gate_operands, *problem.results]
        assert cost(problem).bytes == sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
    rows = CASES["rows gathered"]
    saved = cost(rows.of_rows).bytes - cost(rows).bytes  # half of lhs, less the token of each row
    assert saved == (12 * 5 // 2 - 12) * 4


def test_the_plan_where_no_kernel_applies_it_is_that_of_the_products():
    problem, target = CASES["bf16"], Target(platform="cuda", kind=CARDS["a100"].kind, cores=CARDS["a100"].cores)
    assert gated_plan(problem, target, Overrides()) is None
    operands = [jax.ShapeDtypeStruct(*each) for each in (*problem.operands, *problem.gate_operands)]
    (found, *_) = why(lambda *xs: gated.run(problem, Overrides(), *xs), *operands, target="a100").passes
    assert found.plan == dataclasses.replace(plan(problem.replace(gate=None), target), asked=problem)
    assert "swiglu of gate and up, both kept" in str(found)
    assert list(found.refusals) == ["tpu", "gpu", "cpu", "xla"]


@pytest.mark.parametrize(
    "problem",
    [
        gathered(700, 160, 136, 6, local=5, epilogue=BIAS),
        pullback(700, 160, 136, 6, local=5, k=2),
        total(700, 160, 136, 6),
    ],
    ids=["forward", "pullback", "sum"],
)
def test_tiles_of_every_height_on_a_cpu(problem):
    """Groups that start and end within tiles, after rows that no local group owns and before others; a NaN in those."""
    how = Overrides(backend="xla")
    chosen = gated_plan(problem, Target(platform="cpu"), how)
    assert chosen.layout.heights[-1] == 128 and len(chosen.layout.heights) > 1 and "in each tile" in chosen.because
    sizes, first = np.array([[3, 261, 0, 85, 22, 300]], np.int32), FIRST * (problem.local_groups < 6)
    operands = spoil(problem, sizes, first, numbers(problem, 2), 3, np.nan)
    check(problem, sizes, first, operands, run(problem, operands, sizes, first, how))


def test_rows_are_gathered_before_a_kernel_that_does_not():
    problem, target = CASES["rows gathered"], Target(platform="tpu")
    chosen = gated_plan(problem, target, Overrides())
    assert chosen == dataclasses.replace(gated_plan(problem.of_rows, target, Overrides()), asked=problem)
    operands = [jax.ShapeDtypeStruct(*each) for each in (*problem.operands, *problem.gate_operands)]
    (found, *_) = why(lambda *xs: gated.run(problem, Overrides(), *xs), *operands, target="tpu").passes
    assert found.plan == chosen and "rows gathered" in str(found)


def test_the_plan_of_a_kernel_is_shown():
    problem, target = CASES["both kept"], Target(platform="tpu")
    operands = [jax.ShapeDtypeStruct(*each) for each in (*problem.operands, *problem.gate_operands)]
    (found, *_) = why(lambda *xs: gated.run(problem, Overrides(), *xs), *operands, target="tpu").passes
    assert found.plan == gated_plan(problem, target, Overrides()) and found.plan.backend == "tpu"
    assert found.problem == problem and not found.plan.peeled
