"""MaxText's megablox, with its quantized training: `from trencadis.compat.maxtext import gmm`.

`gmm` has the signature of `maxtext.kernels.megablox.gmm`; without its quantization it is that of
`trencadis.compat.megablox`. With it, rows and weights are quantized on the way, and gradients are those of the numbers,
computed from the quantized ones: a scale of a column of rhs goes to the gradient of the result before d lhs, and one of
a row of lhs before d rhs. Where it differs, it does more:

- `group_offset`, `transpose_rhs` and nine tiles, or three, count in every combination;
- weights are gathered over `weight_gather_axes` as numbers of few bits whatever the calibration is, and as they are
  without quantization, where the original does nothing unless the calibration is fixed;
- gradients that are quantized have scales of their own for each group in d rhs;
- what cannot be done, such as scales of tiles or a zero point, raises; the original leaves some of it out.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from trencadis.compat import CUBE, megablox, tilings
from trencadis.core.jax_compat import varying_axes
from trencadis.quant import Recipe, Scaled
from trencadis.quant.training import trained

ABSENT = (
    "tile_size",
    "act_static_scale",
    "bwd_stochastic_rounding",
    "bwd_weight_grad_tile_size",
    "additional_qt_config",
)
OPERANDS = ("lhs", "rhs", "grad")


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: Any = 3 * CUBE,
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
    """`out[s_i:e_i] = lhs[s_i:e_i] @ rhs[i]`. Arguments not named here are those of `trencadis.compat.megablox.gmm`.

    Args:
      lhs_quantize_dtype: int8, int4 or a float of 8 bits for rows, with a scale for each.
      rhs_quantize_dtype: the same for weights, with a scale for each column, shared over the groups.
      use_qwix_quantization: quantize by `qwix_rule`, or by the rule that qwix has for "gmm" here, and not by the two
        dtypes above.
      weight_gather_axes: pairs of a mesh axis and a dimension of rhs, which is a shard along it.
      lhs_vma_axes: mesh axes over which the result varies.
      qwix_rule: a `qwix.QtRule`, or what has its fields. Of them count `weight_qtype`, `act_qtype`, `bwd_qtype`, their
        calibration methods ("absmax", "absmax,0.9", "fixed,8", "fixed,-8,8"), and `disable_channelwise_axes`.
      partial_sum: is added to the result; also to rows that no group covers.
      use_tokamax_backend: a choice of kernels, as are use_manual_quantization and use_gmm_v2; it changes nothing here,
        nor does rhs_vma_axes, since JAX knows how gradients vary.

    >>> x, w = jnp.array([[127.0, 2.2], [3.0, 0.0]]), jnp.ones((1, 2, 1))
    >>> gmm(x, w, jnp.array([2]), lhs_quantize_dtype=jnp.int8, rhs_quantize_dtype=jnp.int8).ravel()
    Array([129.,   3.], dtype=float32)
    """
    del use_tokamax_backend, rhs_vma_axes, use_manual_quantization, use_gmm_v2
    if partial_sum is not None and existing_out is not None:
        raise ValueError("partial_sum: is added, and existing_out is overwritten; want one of them")
    gathered = tuple((axis, _dimension(dim)) for axis, dim in weight_gather_axes or ())
    rule = _rule(use_qwix_quantization, qwix_rule, lhs_quantize_dtype, rhs_quantize_dtype)
    lhs, rhs, group_sizes = megablox.checked(lhs, rhs, group_sizes, group_offset, rhs_rank=3)
    for name, each, why in (("lhs", lhs, rule), ("rhs", rhs, rule or gathered)):
        if why and isinstance(each, Scaled):
            raise TypeError(f"{name}: is quantized already; want an array to quantize or gather")
    dtype = preferred_element_type if partial_sum is None else jnp.promote_types(preferred_element_type, jnp.float32)
    whole = rhs
    for axis, dim in gathered:  # of weights that are quantized nobody reads it: it stands for what has a gradient
        whole = lax.all_gather(whole, axis, axis=dim, tiled=True)
    given = (lhs, whole, group_sizes)
    if rule is None:
        out = megablox.gmm(*given, dtype, tiling, group_offset, existing_out, transpose_rhs, interpret)
    else:
        recipe = _recipe(rule, [(axis, 3 - dim if transpose_rhs and dim else dim) for axis, dim in gathered])
        out = trained(
            recipe, *given, dtype, tiling=tilings(tiling), group_offset=group_offset, transpose_rhs=bool(transpose_rhs),
            precision=None, backend=None, interpret=bool(interpret),
            weights=None if recipe.rhs is None else recipe.gather(rhs, transpose_rhs),
        )  # fmt: skip
        out = megablox.overwritten(out, existing_out, *given, group_offset, transpose_rhs)
    if partial_sum is not None:
        if jnp.shape(partial_sum) != out.shape:
            raise ValueError(f"partial_sum: want shape {out.shape}, that of the result; got {jnp.shape(partial_sum)}")
        out = (out + partial_sum).astype(preferred_element_type)
    missing = tuple(axis for axis in lhs_vma_axes if axis not in varying_axes(out))
    return lax.pcast(out, missing, to="varying") if missing else out


@dataclasses.dataclass(frozen=True, slots=True)
class _Recipe(Recipe):
    """A recipe with methods of calibration, and weights that come in shards."""

    methods: tuple[tuple[str, float], ...] = ()  # of OPERANDS: "absmax" and a factor, or "fixed" and the bound
    gathered: tuple[tuple[str, int], ...] = ()  # mesh axes, and the dimensions [g, k, n] of rhs that are cut over them

    def bound(self, name: str, most: Array) -> Array:
        method, number = self.methods[OPERANDS.index(name)]
        if method == "fixed" and getattr(self, name)[0].startswith("float8"):  # they have NaN: no need to look for it
            return jnp.full_like(most, number)
        found = np.float32(number) if method == "fixed" else most * np.float32(number)
        # Inf stands for NaN, which gets lost in the maxima of some devices; scales of both are NaN
        most = jnp.where(jnp.isnan(most), jnp.inf, found)
        for axis, dim in self.gathered if name == "rhs" else ():
            most = most if self._apart(dim) else lax.pmax(most, axis)
        return most

    def gather(self, shard: Array, turned: bool) -> Scaled:
        """All of rhs, quantized before it is gathered."""
        r = self.weights(lax.stop_gradient(shard.mT if turned else shard))
        assert isinstance(r, Scaled)
        for axis, dim in self.gathered:
            values, scale = lax.all_gather(r.values, axis, axis=dim, tiled=True), r.scale
            if self._apart(dim):
                scale = lax.all_gather(scale, axis, axis=dim, tiled=True)
            sizes = zip(values.shape, scale.shape, r.block, strict=True)
            block = tuple(size if scales == 1 else length for size, scales, length in sizes)
            r = Scaled(values, scale, r.format, block)
        return r.mT if turned else r

    def _apart(self, dim: int) -> bool:
        """Whether shards of rhs along a dimension have scales of their own, be it a single one."""
        assert isinstance(self.rhs, tuple)
        return dim == 2 and self.rhs[1] != "tensor"


def _dimension(dim: Any) -> int:
    """A dimension of rhs, of which negative ones count from the last."""
    if dim not in range(-3, 3):
        raise ValueError(f"weight_gather_axes: want pairs of a mesh axis and a dimension of rhs, 0 to 2; got {dim!r}")
    return int(dim) % 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Dtypes:
    """What the two dtypes amount to, as a rule."""

    act_qtype: Any
    weight_qtype: Any
    bwd_qtype: Any = None


def _rule(named: bool, rule: Any, lhs: Any, rhs: Any) -> Any:
    """The rule by which a call quantizes, or None."""
    if not named:
        if rule is not None:
            raise ValueError("qwix_rule: counts with use_qwix_quantization=True alone; want that, or no rule")
        return None if lhs is None and rhs is None else _Dtypes(lhs, rhs)
    if rule is None:
        try:
            rule = importlib.import_module("qwix.pallas").get_current_rule("gmm")
        except ImportError:
            rule = None
    if rule is None or not hasattr(rule, "bwd_qtype"):
        raise ValueError(f"qwix_rule: Expect a QtRule for quantized training; got {rule!r}")
    for name in ABSENT:
        if getattr(rule, name, None) is not None:
            raise ValueError(f"qwix_rule: {name} is not supported; got {getattr(rule, name)!r}")
    return rule


def _recipe(rule: Any, gathered: Sequence[tuple[str, int]]) -> _Recipe:
    """A rule as a recipe."""
    types = [getattr(rule, f"{name}_qtype") for name in ("act", "weight", "bwd")]
    methods = [_method(f"{name}_calibration_method", rule) for name in ("act", "weight", "bwd")]
    coarse = getattr(rule, "disable_channelwise_axes", False)
    lhs, rhs, grad = (
        None if dtype is None else (_name(dtype), "tensor" if coarse or method[0] == "fixed" else usual)
        for dtype, method, usual in zip(types, methods, ("row", (0, 0, 1), "row"), strict=True)
    )
    return _Recipe(lhs, rhs, grad, tuple(methods), tuple(gathered))


def _name(dtype: Any) -> str:
    """The name of a format; qwix has some that are no dtypes."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


def _method(name: str, rule: Any) -> tuple[str, float]:
    """A method of calibration, and its number."""
    given = getattr(rule, name, None) or "absmax"
    method, *numbers = given.lower().split(",")
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
