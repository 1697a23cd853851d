"""`Scaled`: numbers of few bits, and the scales that blocks of them share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.dtypes import bits
from trencadis.core.jax_compat import exportable
from trencadis.quant.formats import Format, format_of

Array = jax.Array
Shape = tuple[int, ...]


@exportable
@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Scaled:
    """An array of few bits: entry i stands for `values[i] * scale[i // block] * total`.

    Made by `quantize`, or by hand from what a checkpoint holds.

    Attributes:
      values: as they are stored.
      scale: of the same rank; one for each block, the last of an axis being as long as what is left.
      format: the name of a format.
      block: how long blocks are along each axis.
      total: a scale of the scales, or None.

    >>> x = Scaled(jnp.array([[3, -1], [5, 2]], jnp.int8), jnp.array([[0.5], [2.0]]), "int8", (1, 2))
    >>> x
    Scaled(int8[2,2], scales float32[2,1] of blocks 1 x 2)
    >>> x.dequantize()
    Array([[ 1.5, -0.5],
           [10. ,  4. ]], dtype=float32)
    """

    values: Any
    scale: Any
    format: str
    block: Shape
    total: Any = None

    @property
    def shape(self) -> Shape:
        """Of the numbers it stands for."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """How many axes they have."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the values, as they are stored."""
        return self.values.dtype

    @property
    def wide(self) -> Any:
        """The dtype of products where nobody asks for one: that of the scales, with bfloat16 for those of 8 bits."""
        scales = [x.dtype for x in (self.scale, self.total) if x is not None]
        return jnp.result_type(*(jnp.bfloat16 if bits(each) <= 8 else each for each in scales))

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales, with those of 4 bits two to a byte."""
        leaves = [x for x in (self.values, self.scale, self.total) if x is not None]
        return sum(math.ceil(math.prod(x.shape) * bits(x.dtype) / 8) for x in leaves)

    @property
    def mT(self) -> Scaled:
        """The last two axes exchanged."""
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)

    def transpose(self, *axes: int) -> Scaled:
        """The axes in another order; reversed if none is given."""
        axes = axes or tuple(range(self.ndim))[::-1]
        block = tuple(self.block[axis] for axis in axes)
        return Scaled(self.values.transpose(axes), self.scale.transpose(axes), self.format, block, self.total)

    def merged(self, *counts: int) -> Scaled:
        """Neighbouring axes merged: as many into each new one as counts say, none into one that is 1 long.

        Blocks that would reach into the next row of what is merged become shorter, with the same scale.
        """
        shape, block, scale = list(self.shape), list(self.block), self.scale
        for at, count in enumerate(counts):
            if not count:
                shape.insert(at, 1)
                block.insert(at, 1)
                scale = jnp.expand_dims(scale, at)
            for _ in range(count - 1):
                scale, block[at : at + 2] = _joined(scale, at, shape[at : at + 2], block[at : at + 2])
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
        return Scaled(self.values.reshape(shape), scale, self.format, tuple(block), self.total)

    def __getitem__(self, at: int | slice) -> Scaled:
        """Some of the first axis, such as groups: a slice of them, or one, without that axis."""
        if not isinstance(at, (int, slice)):
            raise TypeError(f"index: want an int or a slice of the first axis; got {type(at).__name__}")
        shared = self.scale.shape[0] == 1
        if not shared and self.block[0] != 1:
            raise ValueError(f"index: blocks are {self.block[0]} long along the first axis; want 1, or all of it")
        which = at if not shared else 0 if isinstance(at, int) else slice(None)
        block = self.block[1:] if isinstance(at, int) else self.block
        values = self.values[at]
        if isinstance(at, slice) and shared:
            block = (max(values.shape[0], 1), *self.block[1:])
        return Scaled(values, self.scale[which], self.format, block, self.total)

    __iter__ = None  # or indices past the end, which JAX clamps, would go on for ever

    def scales(self) -> Array:
        """The scale of each entry, float32, in a shape that broadcasts against the values."""
        found = expanded(jnp.asarray(self.scale).astype(jnp.float32), self.block, self.shape)
        return found if self.total is None else found * self.total

    def dequantize(self, dtype: Any = jnp.float32) -> Array:
        """The numbers it stands for."""
        return (jnp.asarray(self.values).astype(jnp.float32) * self.scales()).astype(dtype)

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], tuple[str, Shape]]:
        """Leaves are values, scale and total."""
        return (self.values, self.scale, self.total), (self.format, self.block)

    @classmethod
    def tree_unflatten(cls, aux: tuple[str, Shape], leaves: Any) -> Scaled:
        """From leaves, which may be anything."""
        values, scale, total = leaves
        return cls(values, scale, *aux, total)

    def __repr__(self) -> str:
        if not hasattr(self.values, "dtype") or not hasattr(self.scale, "dtype"):
            return f"Scaled({self.values!r}, {self.scale!r})"
        blocks = " x ".join(map(str, self.block)) or "1"
        scales = f"{self.scale.dtype.name}{_listed(self.scale.shape)}"
        return f"Scaled({self.values.dtype.name}{_listed(self.shape)}, scales {scales} of blocks {blocks})"


def quantize(x: Any, format: str | Format, granularity: str | tuple[int, ...] | None = None) -> Scaled:
    """Numbers of few bits, with scales such that the largest of each block is the largest the format has.

    Args:
      x: a float array of any rank.
      format: "int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "mxfp8", "mxfp4" or "nvfp4".
      granularity: which entries share a scale. "tensor": all. "row": those of the last axis. "column": those of the
        last but one. "group": all but the first axis. Or how long blocks are along each axis, 0 being all of it:
        `(1, 128, 128)`, or `(0, 0, 1)` for columns that share a scale over the groups. None is "tensor", or for the
        block formats blocks along the last axis.

    Returns:
      A `Scaled`.

    >>> x = jnp.array([[1.0, -2.0, 0.5], [100.0, 0.0, 25.0]])
    >>> quantize(x, "int8", "row").values
    Array([[  64, -127,   32],
           [ 127,    0,   32]], dtype=int8)
    >>> quantize(jnp.ones((2, 64, 8)), "mxfp8", (1, 32, 1))  # weights [g, k, n], blocks along k
    Scaled(float8_e4m3fn[2,64,8], scales float8_e8m0fnu[2,2,8] of blocks 1 x 32 x 1)
    """
    return calibrated(x, format, granularity, lambda most: most)


def calibrated(x: Any, format: str | Format, granularity: Any, bound: Callable[[Array], Array]) -> Scaled:
    """`quantize`, with scales for a bound of each block that a function makes of its largest magnitude."""
    kind, x = format_of(format), checked_floats("x", x)
    block = blocks(kind, granularity, x.shape)
    most = bound(largest(x, block))
    whole = jnp.max(jnp.where(jnp.isfinite(most), most, 0), initial=0) if kind.total else None
    return rounded(kind, x, block, most, whole)


def dequantize(x: Any, dtype: Any = jnp.float32) -> Any:
    """The numbers that a `Scaled` stands for; of a `GroupedTensor` that holds one, the same tensor of an array.

    >>> dequantize(quantize(jnp.array([3.0, -1.5]), "float8_e4m3fn"))
    Array([ 3. , -1.5], dtype=float32)
    """
    if not hasattr(x, "dequantize"):
        raise TypeError(f"x: want a Scaled or a GroupedTensor; got {type(x).__name__}")
    return x.dequantize(dtype)


def rounded(kind: Format, x: Array, block: Shape, most: Array, whole: Array | None) -> Scaled:
    """Numbers in a format: `most` is the largest of each block, and `whole` of what shares a scale of scales."""
    total = None
    if whole is not None:
        total = whole / np.float32(kind.largest * float(jnp.finfo(kind.scales).max))
        total = jnp.where(total > 0, total, 1)
    scale = kind.scale_of(most if total is None else most / total)
    spread = expanded(scale, block, x.shape)
    values = kind.rounded(x / (spread if total is None else spread * total))
    if total is not None and total.ndim:  # several: a `Scaled` has room for one, so they go to what they scale
        return Scaled(values, scale * total, kind.name, block)
    return Scaled(values, scale.astype(kind.scales), kind.name, block, total)


def checked_floats(name: str, x: Any) -> Array:
    """An array of floats, as float32."""
    if x is None or isinstance(x, (str, Scaled)):
        raise TypeError(f"{name}: want an array of floats; got {type(x).__name__}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: want a float dtype; got {x.dtype}")
    return x.astype(jnp.float32)


def expanded(scale: Array, block: Shape, shape: Shape) -> Array:
    """The scale of each entry; axes that have only one stay 1 long."""
    for axis, (length, size) in enumerate(zip(block, shape, strict=True)):
        if scale.shape[axis] > 1:
            scale = _repeated(scale, axis, length, size)
    return scale


def _joined(scale: Array, axis: int, shape: list[int], block: list[int]) -> tuple[Array, list[int]]:
    """The scales, and the length of blocks, where an axis and the next are one."""
    if scale.shape[axis + 1] == 1:  # a block is whole rows of the second
        length = block[0] * shape[1]
    else:
        length = math.gcd(block[1], shape[1])
        scale = _repeated(scale, axis, block[0], shape[0])
        scale = _repeated(scale, axis + 1, block[1] // length, shape[1] // length)
    joined = (*scale.shape[:axis], scale.shape[axis] * scale.shape[axis + 1], *scale.shape[axis + 2 :])
    return scale.reshape(joined), [max(length, 1)]


def _repeated(scale: Array, axis: int, times: int, size: int) -> Array:
    """Each scale a number of times, as many in all as there is room for."""
    if times == 1:
        return scale
    return jax.lax.slice_in_dim(jnp.repeat(scale, times, axis=axis), 0, size, axis=axis)


def largest(x: Array, block: Shape) -> Array:
    """The largest magnitude of each block; NaN where there is one."""
    counts = [-(-size // length) for size, length in zip(x.shape, block, strict=True)]
    short = [(0, c * b - size) for c, b, size in zip(counts, block, x.shape, strict=True)]
    parts = jnp.pad(jnp.abs(x), short).reshape([n for pair in zip(counts, block, strict=True) for n in pair])
    return parts.max(axis=tuple(range(1, parts.ndim, 2)), initial=0)


def blocks(kind: Format, granularity: Any, shape: Shape) -> Shape:
    """How long blocks are along each axis: at least 1, at most the axis."""
    ndim = len(shape)
    if granularity is None:
        given: Any = (*(1,) * (ndim - 1), kind.block) if kind.block and ndim else (0,) * ndim
    elif isinstance(granularity, str):
        given = _named(granularity, ndim)
    else:
        given = tuple(granularity) if isinstance(granularity, (tuple, list)) else ()
    if len(given) != ndim or any(isinstance(b, bool) or not isinstance(b, (int, np.integer)) or b < 0 for b in given):
        raise ValueError(f"granularity: want {ndim} lengths of blocks, 0 being a whole axis; got {granularity!r}")
    if kind.block and sorted(given) != [*(1,) * (ndim - 1), kind.block]:
        raise ValueError(f"granularity: {kind.name} has blocks of {kind.block} along one axis; got {granularity!r}")
    return tuple(max(min(int(b) or size, size), 1) for b, size in zip(given, shape, strict=True))


def _named(name: str, ndim: int) -> Shape:
    """Blocks by a name."""
    least = {"tensor": 0, "row": 1, "group": 1, "column": 2}
    if name not in least:
        raise ValueError(f"granularity: want one of {', '.join(least)}, or lengths of blocks; got {name!r}")
    if ndim < least[name]:
        raise ValueError(f"granularity: {name!r} wants at least {least[name]} dimensions; got {ndim}")
    if name == "tensor":
        return (0,) * ndim
    if name == "group":
        return (1, *(0,) * (ndim - 1))
    whole = ndim - 1 if name == "row" else ndim - 2
    return tuple(0 if axis == whole else 1 for axis in range(ndim))


def _listed(shape: Any) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
