"""Activations as programs: their operations, run here by numpy, are those of the function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from trencadis import moe
from trencadis.backends.cpu import programs
from trencadis.core.epilogue import Gate

RUN = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "select": lambda a, b, c: np.where(a != 0, b, c),
    "abs": np.abs, "sqrt": np.sqrt, "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "tanh": np.tanh, "logistic": special.expit, "erf": special.erf, "erfc": special.erfc,
}  # fmt: skip


def run(program, *inputs):
    """The results of a program, each operation by numpy; a register that nothing was written to is NaN."""
    registers = np.full((program.registers, *inputs[0].shape), np.nan)
    registers[: len(inputs) + len(program.constants)] = [
        *inputs, *(np.full(inputs[0].shape, x) for x in program.constants)
    ]  # fmt: skip
    for operation, to, *operands in program.code:
        function = RUN[programs.OPERATIONS[operation]]
        count = 3 if programs.OPERATIONS[operation] == "select" else getattr(function, "nin", 1)
        registers[to] = function(*(registers[i] for i in operands[:count]))
    return registers[list(program.results)]


ACTIVATIONS = {
    name: getattr(jax.nn, name)
    for name in ("relu", "gelu", "silu", "softplus", "elu", "leaky_relu", "relu6", "hard_swish", "mish", "log_sigmoid")
} | {
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "a negative and a square": lambda x: -x + x * x,  # both have an input and a constant or an input
    "zeros of both signs": lambda x: jnp.where(x > 0, 1 / (0.0 * x + 0.0), x * -0.0),
    "a constant": lambda x: 3.0,
    "itself": lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_programs_of_activations(name):
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    with np.errstate(divide="ignore"):
        (got,) = run(programs.of_activation(ACTIVATIONS[name]), x)
    want = np.broadcast_to(jax.vmap(ACTIVATIONS[name])(x), x.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [
    moe.swiglu(), moe.swiglu(limit=2.0, alpha=1.702, shift=1.0), lambda gate, up: jax.nn.gelu(gate) * up,
])  # fmt: skip
def test_programs_of_gated_activations(activation):
    """Of the forward pass, and of the pullback, whose results are many values in few registers."""
    d_h, gate, up, weight = np.random.default_rng(0).normal(size=(4, 50), scale=2.0).astype(np.float32)
    h, pull = jax.vjp(jax.vmap(activation), gate, up)
    got = run(programs.of_gate(Gate(activation=activation, keep=True)), gate, up)
    np.testing.assert_allclose(got, [h, gate, up], rtol=1e-5, atol=1e-6)
    pullback = programs.of_gate(Gate(activation=activation, pullback=True))
    want = *pull(weight * d_h), weight * h, d_h * h
    np.testing.assert_allclose(run(pullback, d_h, gate, up, weight), want, rtol=1e-4, atol=1e-5)
    assert pullback.registers < 20  # of a kilobyte each, so that they stay in the L1 cache


@pytest.mark.parametrize("activation", [
    jnp.sin, lambda x: x.astype(jnp.bfloat16).astype(x.dtype), lambda x: x**20, lambda x: x * jnp.arange(3.0),
    lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * x, x),
], ids=["sin", "bfloat16", "a high power", "an array", "a loop"])  # fmt: skip
def test_other_operations_have_no_program(activation):
    assert programs.of_activation(activation) is None
