"""MaxText's megablox with its quantized training: `from trencadis.compat.maxtext import gmm`.

`gmm` has the signature of `maxtext.kernels.megablox.gmm`. Without quantization it is `trencadis.compat.megablox.gmm`.
With it, rows and weights are quantized on the way, rounding counts as the identity in gradients, and gradients are
computed from the quantized values: a scale of a column of rhs is applied to the gradient of the result before d lhs,
and a scale of a row of lhs before d rhs. Where this module differs from the original, it does more:

- `group_offset`, `transpose_rhs` and three or nine tile sizes work in every combination;
- weights are gathered over `weight_gather_axes` after quantization, whatever the calibration is, and unquantized if
  there is no quantization; the original gathers only if the calibration is fixed;
- the quantized gradient has its own scales for each group in d rhs;
- what is not supported, such as tiles of scales or a zero point, raises; the original ignores some of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from trencadis.compat import DEFAULT_TILE, PeerTiling, megablox, tilings
from trencadis.core import arguments
from trencadis.core.call import Options
from trencadis.core.jax_compat import varying_axes
from trencadis.quant import Recipe, Scaled
from trencadis.quant.formats import format_of
from trencadis.quant.training import trained

UNSUPPORTED = (
    "tile_size",
    "act_static_scale",
    "bwd_stochastic_rounding",
    "bwd_weight_grad_tile_size",
    "additional_qt_config",
)
OPERANDS = ("lhs", "rhs", "grad")
ROLES = ("act", "weight", "bwd")  # what a `qwix.QtRule` calls these three
Gathered = tuple[tuple[str, int], ...]  # mesh axes, and the dimensions of rhs that are sharded over them


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: PeerTiling = 3 * DEFAULT_TILE,
    group_offset: Any = None,
    existing_out: Float[Array, "m n"] | None = None,
    transpose_rhs: bool = False,
    interpret: bool | None = None,
    lhs_quantize_dtype: Any = None,
    rhs_quantize_dtype: Any = None,
    use_qwix_quantization: bool = False,
    use_tokamax_backend: bool = False,
    weight_gather_axes: Sequence[tuple[str, int]] | None = None,
    lhs_vma_axes: Sequence[str] = (),
    rhs_vma_axes: Sequence[str] = (),
    qwix_rule: Any = None,
    use_manual_quantization: bool = False,
    use_gmm_v2: Any = False,
    partial_sum: Float[Array, "m n"] | None = None,
) -> Float[Array, "m n"]:
    """Multiply groups of rows, each by its own matrix: `out[s_i:e_i] = lhs[s_i:e_i] @ rhs[i]`.

    Arguments that are not listed are those of `trencadis.compat.megablox.gmm`.

    Args:
      lhs_quantize_dtype: int8, int4 or an 8-bit float to quantize rows to, with one scale per row.
      rhs_quantize_dtype: the same for weights, with one scale per column, shared by all groups.
      use_qwix_quantization: quantize by `qwix_rule`, or by the rule that qwix has for "gmm" here, and not by the two
        dtypes above.
      weight_gather_axes: pairs of a mesh axis and the dimension of rhs that is sharded over it.
      lhs_vma_axes: mesh axes over which the result varies.
      qwix_rule: a `qwix.QtRule`, or an object with its fields. These count: `weight_qtype`, `act_qtype`, `bwd_qtype`,
        their calibration methods ("absmax", "absmax,0.9", "fixed,8", "fixed,-8,8"), and `disable_channelwise_axes`.
      partial_sum: is added to the result, also in unowned rows.
      use_tokamax_backend: chooses kernels in the original, as do use_manual_quantization and use_gmm_v2; none of them
        has an effect here, nor has rhs_vma_axes, since JAX knows how gradients vary.

    >>> x, w = jnp.array([[127.0, 2.2], [3.0, 0.0]]), jnp.ones((1, 2, 1))
    >>> gmm(x, w, jnp.array([2]), lhs_quantize_dtype=jnp.int8, rhs_quantize_dtype=jnp.int8).ravel()
    Array([129.,   3.], dtype=float32)
    """
    del use_tokamax_backend, rhs_vma_axes, use_manual_quantization, use_gmm_v2
    if partial_sum is not None and existing_out is not None:
        raise ValueError("partial_sum: is added, and existing_out is overwritten; want one of them")
    transposed = arguments.checked_flag("transpose_rhs", transpose_rhs)
    gathered = _gathered(weight_gather_axes)
    recipe = _recipe(use_qwix_quantization, qwix_rule, lhs_quantize_dtype, rhs_quantize_dtype, gathered, transposed)
    lhs, rhs, group_sizes = megablox.checked(lhs, rhs, group_sizes, group_offset, rhs_rank=3)
    _check_operands(lhs, rhs, recipe, gathered)
    dtype = arguments.result_dtype(preferred_element_type)
    kept = dtype if partial_sum is None else jnp.promote_types(dtype, jnp.float32)
    whole = rhs  # with quantized weights nothing reads its values: it is what the gradient belongs to
    for axis, dim in gathered:
        whole = lax.all_gather(whole, axis, axis=dim, tiled=True)
    partial_sum = _checked_partial_sum(partial_sum, (lhs.shape[0], whole.shape[1 if transposed else 2]))
    given = (lhs, whole, group_sizes)
    if recipe is None:
        out = megablox.gmm(*given, kept, tiling, group_offset, existing_out, transposed, interpret)
    else:
        interpreted = interpret is not None and arguments.checked_flag("interpret", interpret)
        out = trained(
            recipe, *given, kept, Options(tiling=tilings(tiling), interpret=interpreted),
            transpose_rhs=transposed, group_offset=group_offset,
            weights=None if recipe.rhs is None else recipe.gather(rhs, transposed),
        )  # fmt: skip
        out = megablox.overwritten(out, existing_out, group_sizes, group_offset, whole.shape[0])
    if partial_sum is not None:
        out = (out + partial_sum).astype(dtype)
    missing = tuple(axis for axis in _axis_names(lhs_vma_axes) if axis not in varying_axes(out))
    return lax.pcast(out, missing, to="varying") if missing else out


@dataclasses.dataclass(frozen=True, slots=True)
class _Recipe(Recipe):
    """A recipe with calibration methods, and with weights that are sharded over mesh axes."""

    methods: tuple[tuple[str, float], ...] = ()  # of OPERANDS: "absmax" and a factor, or "fixed" and the bound
    gathered: Gathered = ()  # with the dimensions of rhs as [g, k, n]

    def bound(self, name: str, most: Array) -> Array:
        """The largest magnitudes to calibrate scales for, from those found in lhs, rhs or grad."""
        method, number = self.methods[OPERANDS.index(name)]
        if method == "fixed" and getattr(self, name)[0].startswith("float8"):  # values hold NaN: no need to look for it
            return jnp.full_like(most, number)
        found = np.float32(number) if method == "fixed" else most * np.float32(number)
        # Inf stands for NaN, which the maxima of some devices drop; the scale of either is NaN
        most = jnp.where(jnp.isnan(most), jnp.inf, found)
        for axis, dim in self.gathered if name == "rhs" else ():
            most = most if self._has_own_scales(dim) else lax.pmax(most, axis)
        return most

    def gather(self, shard: Array, transposed: bool) -> Scaled:
        """The whole of rhs, from a shard that is quantized before it is gathered."""
        r = self.weights(lax.stop_gradient(shard.mT if transposed else shard))
        assert isinstance(r, Scaled)
        for axis, dim in self.gathered:
            values, scale = lax.all_gather(r.values, axis, axis=dim, tiled=True), r.scale
            if self._has_own_scales(dim):
                scale = lax.all_gather(scale, axis, axis=dim, tiled=True)
            sizes = zip(values.shape, scale.shape, r.block, strict=True)
            block = tuple(size if scales == 1 else length for size, scales, length in sizes)
            r = Scaled(values, scale, r.format, block)
        return r.mT if transposed else r

    def _has_own_scales(self, dim: int) -> bool:
        """True if each shard of rhs along a dimension has its own scales, be it a single one."""
        assert isinstance(self.rhs, tuple)
        return dim == 2 and self.rhs[1] != "tensor"


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _gathered(weight_gather_axes: Any) -> Gathered:
    """weight_gather_axes with dimensions counted from 0, or an error that names the argument."""
    try:
        pairs = [(axis, operator.index(dim)) for axis, dim in weight_gather_axes or ()]
    except (TypeError, ValueError):
        pairs = [(None, 0)]
    if not all(isinstance(axis, str) and -3 <= dim < 3 for axis, dim in pairs):
        raise ValueError(
            f"weight_gather_axes: want pairs of a mesh axis and a dimension of rhs, 0 to 2; got {weight_gather_axes!r}"
        )
    return tuple((axis, dim % 3) for axis, dim in pairs)


def _axis_names(lhs_vma_axes: Any) -> tuple[str, ...]:
    """lhs_vma_axes as a tuple of names, or an error that names the argument."""
    names = () if lhs_vma_axes is None else lhs_vma_axes
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"lhs_vma_axes: want a sequence of mesh axis names; got {lhs_vma_axes!r}")
    return tuple(names)


def _check_operands(lhs: Any, rhs: Any, recipe: _Recipe | None, gathered: Gathered) -> None:
    """Raise for an operand that is to be quantized or gathered and is quantized already, or holds no floats."""
    for name, x, used in (("lhs", lhs, recipe is not None), ("rhs", rhs, recipe is not None or bool(gathered))):
        if used and isinstance(x, Scaled):
            raise TypeError(f"{name}: is quantized already; want an array to quantize or gather")
        if recipe is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: want a float dtype to quantize; got {x.dtype}")


def _checked_partial_sum(partial_sum: Any, shape: tuple[int, int]) -> Any:
    """partial_sum as an array of the shape of the result, or an error that names the argument."""
    if partial_sum is None:
        return None
    partial_sum = arguments.as_array("partial_sum", partial_sum)
    if partial_sum.shape != shape:
        raise ValueError(f"partial_sum: want shape {shape}, that of the result; got {partial_sum.shape}")
    if not jnp.issubdtype(partial_sum.dtype, jnp.number):
        raise TypeError(f"partial_sum: want a number dtype; got {partial_sum.dtype}")
    return partial_sum


# ---------------------------------------------------------------------------------------------------------------------
# From dtypes, or a rule, to a recipe


@dataclasses.dataclass(frozen=True, slots=True)
class _Dtypes:
    """The rule that lhs_quantize_dtype and rhs_quantize_dtype amount to."""

    act_qtype: Any
    weight_qtype: Any
    bwd_qtype: Any = None


def _recipe(by_rule: Any, rule: Any, lhs: Any, rhs: Any, gathered: Gathered, transposed: bool) -> _Recipe | None:
    """The recipe for a call from its rule, or from its two dtypes; None if nothing is quantized."""
    names = [f"qwix_rule: {role}_qtype" for role in ROLES]
    if arguments.checked_flag("use_qwix_quantization", by_rule):
        rule = _checked_rule(rule)
    elif rule is not None:
        raise ValueError("qwix_rule: counts with use_qwix_quantization=True alone; want that, or no rule")
    elif lhs is None and rhs is None:
        return None
    else:
        rule, names[:2] = _Dtypes(lhs, rhs), ["lhs_quantize_dtype", "rhs_quantize_dtype"]
    formats = [_format(name, getattr(rule, f"{role}_qtype", None)) for name, role in zip(names, ROLES, strict=True)]
    methods = [_method(f"{role}_calibration_method", rule) for role in ROLES]
    coarse = arguments.checked_flag(
        "qwix_rule: disable_channelwise_axes", getattr(rule, "disable_channelwise_axes", False)
    )
    lhs, rhs, grad = (
        None if format is None else (format, "tensor" if coarse or method[0] == "fixed" else usual)
        for format, method, usual in zip(formats, methods, ("row", (0, 0, 1), "row"), strict=True)
    )
    stored = tuple((axis, 3 - dim if transposed and dim else dim) for axis, dim in gathered)
    return _Recipe(lhs, rhs, grad, tuple(methods), stored)


def _checked_rule(rule: Any) -> Any:
    """The rule, by default the one that qwix has for "gmm" at this point of the program, or an error."""
    if rule is None:
        try:
            rule = importlib.import_module("qwix.pallas").get_current_rule("gmm")
        except ImportError:
            rule = None
    if rule is None or not hasattr(rule, "bwd_qtype"):
        raise ValueError(f"qwix_rule: Expect a QtRule for quantized training; got {rule!r}")
    for name in UNSUPPORTED:
        if getattr(rule, name, None) is not None:
            raise ValueError(f"qwix_rule: {name} is not supported; got {getattr(rule, name)!r}")
    return rule


def _format(name: str, dtype: Any) -> str | None:
    """The name of the format for a dtype or a name that qwix has for one; an error names the argument."""
    if dtype is None:
        return None
    try:
        return format_of(dtype if isinstance(dtype, str) else jnp.dtype(dtype).name).name
    except (TypeError, ValueError) as error:
        wanted = (
            str(error).removeprefix("format: ") if isinstance(error, ValueError) else f"want a dtype; got {dtype!r}"
        )
        raise ValueError(f"{name}: {wanted}") from None


def _method(name: str, rule: Any) -> tuple[str, float]:
    """A calibration method of the rule: "absmax" and a factor, or "fixed" and a bound."""
    given = getattr(rule, name, None)
    given = "absmax" if given is None else given
    method, *numbers = given.lower().split(",") if isinstance(given, str) else ("",)
    try:
        found = [float(number) for number in numbers]
    except ValueError:
        found = []
    if method == "absmax" and not numbers:
        return method, 1.0
    if method == "fixed" and len(found) == 2 and found[0] == -found[1]:
        found = found[1:]
    if method in ("absmax", "fixed") and len(found) == 1 and 0 < found[0] < np.inf:
        return method, found[0]
    raise ValueError(f"qwix_rule: want absmax or a fixed range around 0 as {name}; got {given!r}")
