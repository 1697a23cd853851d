"""TransformerEngine's scaling modes, and the quantizers that hold the settings and the state of quantization."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import arguments
from trencadis.quant.formats import FORMATS, VARIANTS, Format

STATIC = {"static": True}
HISTORY = 1024  # the number of calls that delayed scaling looks back on


class ScalingMode(enum.Enum):
    """Which entries share a scale, and whether it comes from the tensor itself or from earlier calls."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1  # one scale per group, from the largest magnitudes of earlier calls
    MXFP8_1D_SCALING = 2  # one scale per 32 entries
    CURRENT_TENSOR_SCALING = 3  # one scale per group, from its own largest magnitude

    def is_tensor_scaling(self) -> bool:
        """True if there is one scale per group."""
        return self in (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.CURRENT_TENSOR_SCALING)

    def is_1d_block_scaling(self) -> bool:
        """True if there is one scale per block of 32 entries."""
        return self is ScalingMode.MXFP8_1D_SCALING


class QuantizeLayout(enum.Enum):
    """The axis along which blocks lie: the last (rowwise), the one before it (colwise), or both, in two tensors."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2


class TensorUsage(enum.Enum):
    """The role of a tensor in a GEMM, which decides along which axis its blocks have to lie."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3

    @property
    def colwise(self) -> bool:
        """True if the contracted axis is not the last one, so that blocks have to be colwise."""
        return self in (TensorUsage.LHS_TRANS, TensorUsage.RHS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GroupedQuantizer:
    """The settings for quantizing a grouped tensor; with delayed scaling also `scale` and `amax_history` of each group.

    Made by `QuantizerFactory.create`.
    """

    scale: Any = None
    amax_history: Any = None
    q_dtype: Any = dataclasses.field(default=jnp.float8_e4m3fn, metadata=STATIC)
    scaling_mode: ScalingMode = dataclasses.field(default=ScalingMode.CURRENT_TENSOR_SCALING, metadata=STATIC)
    q_layout: QuantizeLayout = dataclasses.field(default=QuantizeLayout.ROWWISE, metadata=STATIC)
    n_groups: int = dataclasses.field(default=1, metadata=STATIC)

    @property
    def quantizers(self) -> tuple[GroupedQuantizer, ...]:
        """A tuple of this quantizer alone: the original has one per group, here one serves all groups."""
        return (self,)

    @property
    def format(self) -> Format:
        """The `quant` format of the values and scales that this quantizer makes."""
        plain = FORMATS[np.dtype(self.q_dtype).name]
        if self.scaling_mode.is_tensor_scaling():
            return plain
        return FORMATS["mxfp8"] if plain.name == "float8_e4m3fn" else VARIANTS["mxfp8_e5m2"]

    def update(self, amax: Any) -> None:
        """Record the largest magnitude of each group, `[g]`, for the scales of the next call with delayed scaling."""
        if self.scaling_mode is not ScalingMode.DELAYED_TENSOR_SCALING:
            return
        history = self.amax_history.at[:, 0].set(amax)
        most = jnp.where(jnp.isnan(history), jnp.inf, history).max(axis=1)  # on CPU, a maximum drops NaN
        self.scale = jnp.where((most > 0) & jnp.isfinite(most), np.float32(self.format.largest) / most, self.scale)
        self.amax_history = jnp.roll(history, -1, axis=1).at[:, 0].set(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class QuantizerSet:
    """The quantizers of a layer: for its input, its kernel, and the gradient of its result; None quantizes nothing."""

    x: GroupedQuantizer | None = None
    kernel: GroupedQuantizer | None = None
    dgrad: GroupedQuantizer | None = None


noop_quantizer_set = QuantizerSet()


class QuantizerFactory:
    """Makes quantizers for grouped tensors, with the signatures of TransformerEngine's factory."""

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype: Any = None,
        q_layout: QuantizeLayout = QuantizeLayout.ROWWISE,
        n_groups: int | None = None,
    ) -> Any:
        """A quantizer, or a tuple of n_quantizers if that is more than 1; None without scaling.

        >>> QuantizerFactory.create(scaling_mode=ScalingMode.NO_SCALING) is None
        True
        """
        count = _positive("n_quantizers", n_quantizers)
        made = [_quantizer(scaling_mode, q_dtype, q_layout, n_groups) for _ in range(count)]
        return made[0] if count == 1 else tuple(made)

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        fwd_dtype: Any = jnp.float8_e4m3fn,
        bwd_dtype: Any = jnp.float8_e5m2,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
    ) -> Any:
        """A set of quantizers, or a tuple of n_quantizer_sets if that is more than 1.

        >>> made = QuantizerFactory.create_set(scaling_mode=ScalingMode.MXFP8_1D_SCALING, n_groups=2)
        >>> made.kernel.q_layout, made.dgrad.q_dtype.__name__
        (<QuantizeLayout.ROWWISE_COLWISE: 2>, 'float8_e5m2')
        """
        mode = _checked("scaling_mode", scaling_mode, ScalingMode)
        both = mode.is_1d_block_scaling() if is_2x2x is None else arguments.checked_flag("is_2x2x", is_2x2x)
        rows = QuantizeLayout.ROWWISE_COLWISE if both else QuantizeLayout.ROWWISE
        kernel = QuantizeLayout.COLWISE if mode.is_1d_block_scaling() and not both else rows
        parts = ((fwd_dtype, rows, "fwd_dtype"), (fwd_dtype, kernel, "fwd_dtype"), (bwd_dtype, rows, "bwd_dtype"))
        count = _positive("n_quantizer_sets", n_quantizer_sets)
        sets = [
            QuantizerSet(*(_quantizer(mode, dtype, layout, n_groups, name) for dtype, layout, name in parts))
            for _ in range(count)
        ]
        return sets[0] if count == 1 else tuple(sets)


def _quantizer(mode: Any, dtype: Any, layout: Any, groups: Any, name: str = "q_dtype") -> GroupedQuantizer | None:
    """A quantizer, or None without scaling; an argument that it cannot be made of raises."""
    mode, layout = _checked("scaling_mode", mode, ScalingMode), _checked("q_layout", layout, QuantizeLayout)
    if mode is ScalingMode.NO_SCALING:
        return None
    _check_dtype(name, dtype)
    if groups is None:
        raise ValueError("n_groups: want the number of groups; quantizers here are for grouped tensors")
    groups = _positive("n_groups", groups)
    state: dict[str, Any] = {}
    if mode is ScalingMode.DELAYED_TENSOR_SCALING:
        state = {"scale": jnp.ones((groups,)), "amax_history": jnp.zeros((groups, HISTORY))}
    return GroupedQuantizer(**state, q_dtype=dtype, scaling_mode=mode, q_layout=layout, n_groups=groups)


def _checked(name: str, given: Any, kind: type[Any]) -> Any:
    """A member of this enum, or a TypeError that names the argument."""
    if not isinstance(given, kind):
        raise TypeError(f"{name}: want a {kind.__name__}; got {given!r}")
    return given


def _check_dtype(name: str, dtype: Any) -> None:
    """Raise unless the dtype is one of the two 8-bit floats that TransformerEngine quantizes to."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        got = repr(dtype) if found is None else found.name
        raise TypeError(f"{name}: want float8_e4m3fn or float8_e5m2; got {got}")


def _positive(name: str, count: Any) -> int:
    """A positive int, or a ValueError that names the argument."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"{name}: want a positive int; got {count!r}")
    return int(count)
