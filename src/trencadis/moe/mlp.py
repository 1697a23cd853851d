"""`moe_mlp`: the experts of a Mixture-of-Experts layer, from tokens and their routing to the combined result."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from trencadis.core import arguments
from trencadis.core.activation import Activation, static_activation
from trencadis.core.alike import sharded_like
from trencadis.core.call import Options
from trencadis.core.mesh import Over, replicated, resharded_like
from trencadis.core.plan import check_backend
from trencadis.core.programs import is_fixed
from trencadis.moe import layer as layers
from trencadis.moe import sharded
from trencadis.moe.activation import swiglu
from trencadis.moe.layer import SAVE, Experts, Indices, Inputs, Layer, Save
from trencadis.moe.permutation import sort_by_expert
from trencadis.moe.routing import Routing, check_routing_for
from trencadis.quant.operand import Operand, array_operand
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled


def moe_mlp(
    x: Float[Array, "t d"],
    routing: Routing,
    w_gate: Operand | None,
    w_up: Operand,
    w_down: Operand,
    *,
    bias_gate: Float[Array, "e f"] | None = None,
    bias_up: Float[Array, "e f"] | None = None,
    bias_down: Float[Array, "e d"] | None = None,
    activation: Activation = swiglu(),
    save: Save = "least",
    quantization: Recipe | None = None,
    group_offset: ArrayLike | None = None,
    backend: str | None = None,
) -> Float[Array, "t d"]:
    """Apply to each token the MLPs of its experts, and sum the results by the weights of the routing.

    `out[t] = sum_j weights[t, j] * (activation(x[t] @ w_gate[e], x[t] @ w_up[e]) @ w_down[e])`, `e = experts[t, j]`.
    No token is dropped, and nothing is padded. Tokens of no expert give 0. Products are summed in float32. The backward
    pass keeps x and the pre-activations, `t * d + 2 * t * k * f` numbers, and has no scatter: results and gradients are
    bitwise equal from run to run. Forward mode and higher derivatives work as well.

    Args:
      x: `[t, d]`, the tokens. The result, and what is kept for the backward pass, have its dtype.
      routing: what `route` returns.
      w_gate: `[e, d, f]`, or None for experts without a gate; an array, a `quant.Scaled` or a `qwix.QArray`.
      w_up: `[e, d, f]`, likewise. It is never concatenated with w_gate.
      w_down: `[e, f, d]`, likewise.
      bias_gate: `[e, f]`, added before the activation.
      bias_up: `[e, f]`, likewise.
      bias_down: `[e, d]`, added to the output of an expert, before the weight of the routing.
      activation: a function of two numbers, gate and up, such as `swiglu()`; of one without w_gate, `jax.nn.relu`.
      save: what the backward pass keeps. "least": x and the pre-activations; "fast": the sorted rows, too,
        `t * k * d` more numbers; "inputs": x alone, so that gate and up are multiplied again. With quantization, or an
        activation that closes over traced values, the first two are the same: JAX keeps what derivatives of the
        products and the activation need, such as quantized weights and factors of the activation.
      quantization: a `quant.Recipe` by which all three products quantize their operands, for training.
      group_offset: the first expert of these weights, if they are a window of all experts. Other experts add nothing.
      backend: as in `grouped_matmul`.

    Returns:
      `[t, d]`, of the dtype of x.

    >>> from trencadis.moe import route
    >>> x, router = jnp.ones((4, 8)), jax.random.normal(jax.random.key(0), (8, 3))
    >>> w_gate, w_up, w_down = jnp.ones((3, 8, 16)) / 8, jnp.ones((3, 8, 16)) / 8, jnp.ones((3, 16, 8)) / 16
    >>> [round(float(y), 3) for y in moe_mlp(x, route(x @ router, 2), w_gate, w_up, w_down)[:, 0]]
    [0.731, 0.731, 0.731, 0.731]
    """
    x = arguments.as_array("x", x)
    given = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    given |= {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": bias_down}
    experts = Experts(*(None if w is None else array_operand(name, w) for name, w in given.items()))
    _check(x, routing, experts, save)
    first = arguments.first_group(group_offset)
    if group_offset is None and experts.up.shape[0] != routing.sizes.shape[0]:
        raise ValueError(
            f"w_up: holds {experts.up.shape[0]} experts and the routing has {routing.sizes.shape[0]}; want as many, or "
            "group_offset to say which of them these are"
        )
    arguments.check_window(first, experts.up.shape[0], routing.sizes.shape[0])
    if x.shape[0] == 0:
        return x
    dtype = np.dtype(x.dtype)
    static = static_activation(activation, dtype, dtype, 1 if w_gate is None else 2)
    layer = Layer(
        activation=static or activation, dtype=dtype, gated=w_gate is not None, traced=static is None,
        save=save, options=Options(backend=check_backend(backend)),
    )  # fmt: skip
    if quantization is not None and any(isinstance(w, Scaled) for w in experts):
        raise ValueError("quantization: want weights that are arrays; got weights that are quantized already")
    division = None if layer.traced else sharded.division_of(x, routing.experts.shape[1], experts)
    if division is None or (quantization is not None and not _scales_fit(quantization, division, experts)):
        apply = _OneDevice(layer, quantization, routing.sizes.shape[0])
        alike = sharded_like(x, x)  # on automatic axes its gradient is sharded like it
        tokens, chosen, weights = map(replicated, (alike, routing.experts, routing.weights))
        return resharded_like(apply(tokens, chosen, weights, experts, first), x)
    over = Over(m=division.local, n=division.width, g=division.experts)  # of gate and up; k of down is n of these
    options = dataclasses.replace(layer.options, over=over)
    apply = _OneDevice(dataclasses.replace(layer, options=options), quantization, routing.sizes.shape[0])
    tokens = x, routing.experts, routing.weights
    out = sharded.run(apply, division, *tokens, experts, jnp.asarray(first, jnp.int32))
    return resharded_like(out, x)


def _scales_fit(recipe: Recipe, division: sharded.Division, experts: Experts) -> bool:
    """Whether no block of scales is cut in two, of rows in the order of experts or of weights."""
    units = recipe.units
    f, e = (math.prod(division.mesh.shape[axis] for axis in axes) for axes in (division.width, division.experts))
    width = experts.up.shape[2] // f % math.lcm(units["k"], units["n"]) == 0 or f == 1
    return units["m"] == 1 and width and experts.up.shape[0] // e % units["g"] == 0


@dataclasses.dataclass(frozen=True, slots=True)
class _OneDevice:
    """The layer of one device, which has all tokens that it is given, as a function that equals another like it."""

    layer: Layer
    recipe: Recipe | None
    num_experts: int

    def __call__(self, x: Array, chosen: Array, weights: Array, experts: Experts, first: Any) -> Array:
        frozen = Experts(*(w if isinstance(w, Scaled) else None for w in experts))
        learned = Experts(*(None if isinstance(w, Scaled) else w for w in experts))
        # a program that others may share closes over no traced values, nor over what a user's recipe reads
        shared = not self.layer.traced and is_fixed(self)
        run = functools.partial(_run, self) if shared else self.run
        return run(chosen, first, frozen, Inputs(x, weights, learned))

    def run(self, chosen: Array, first: Any, frozen: Experts, inputs: Inputs) -> Array:
        """The result for parameters that are quantized already, frozen, and others, among the inputs."""
        permutation = sort_by_expert(chosen, self.num_experts)
        indices = Indices(permutation, jnp.asarray(first, jnp.int32), jax.lax.stop_gradient(frozen))
        if self.recipe is None and not self.layer.traced:
            return layers.run(self.layer, indices, inputs)
        # the layer's own backward pass would miss gradients of what the activation closes over
        function = functools.partial(layers.value, self.layer)
        if self.recipe is not None:
            function = functools.partial(layers.quantized, self.layer, self.recipe)
        return (jax.checkpoint(function) if self.layer.save == "inputs" else function)(indices, inputs)


@functools.partial(jax.jit, static_argnums=0)
def _run(one: _OneDevice, chosen: Array, first: Any, frozen: Experts, inputs: Inputs) -> Array:
    """The layer as one function, so that equal layers are lowered once."""
    return one.run(chosen, first, frozen, inputs)


def check_tokens(x: Array) -> None:
    """Raise unless x holds tokens `[t, d]` in a dtype that a result can have."""
    check_floats(x)
    if x.ndim != 2:
        raise ValueError(f"x: want tokens of shape [t, d]; got shape {x.shape}. moe.apply takes [..., d]")
    arguments.check_static("x", x)


def check_floats(x: Array) -> None:
    """Raise unless x has a dtype that a result can have."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        raise ValueError(
            f"x: want floats of 16 bits or more; got {x.dtype}. Products in 8 bits are for quantization to choose"
        )


def check_save(save: object) -> None:
    """Raise unless it says what the backward pass keeps."""
    if save not in SAVE:
        raise ValueError(f"save: want one of {', '.join(map(repr, SAVE))}; got {save!r}")


def _check(x: Array, routing: Routing, experts: Experts, save: str) -> None:
    """Raise an error that names the argument if shapes or dtypes do not fit."""
    check_tokens(x)
    t, d = x.shape
    check_routing_for(routing, t)
    if routing.weights.shape != routing.experts.shape:
        raise ValueError(f"routing: want weights of shape {routing.experts.shape}; got {routing.weights.shape}")
    check_save(save)
    if experts.up is None or experts.up.ndim != 3 or experts.up.shape[1] != d:
        raise ValueError(f"w_up: want [e, d, f] with d = {d}, the last dimension of x; got {jnp.shape(experts.up)}")
    e, _, f = experts.up.shape
    if e > routing.sizes.shape[0]:
        raise ValueError(f"w_up: holds {e} experts but the routing has {routing.sizes.shape[0]}")
    wanted = {"w_gate": (e, d, f), "w_down": (e, f, d), "bias_gate": (e, f), "bias_up": (e, f), "bias_down": (e, d)}
    named = {"w_gate": experts.gate, "w_down": experts.down, "bias_gate": experts.bias_gate}
    named |= {"bias_up": experts.bias_up, "bias_down": experts.bias_down}
    if experts.down is None:
        raise ValueError(f"w_down: want shape {wanted['w_down']}, as w_up has {experts.up.shape}; got None")
    for name, want in wanted.items():
        if named[name] is not None and tuple(named[name].shape) != want:
            raise ValueError(f"{name}: want shape {want}, as w_up has {experts.up.shape}; got {named[name].shape}")
    if experts.bias_gate is not None and experts.gate is None:
        raise ValueError("bias_gate: want None where w_gate is None")
