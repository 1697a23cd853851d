"""`Scaled`: an array of low-precision values with a scale for each block of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike, DTypeLike

from trencadis.core.dtypes import bits
from trencadis.core.jax_compat import exportable
from trencadis.quant.formats import Format, FormatLike, format_of

Array = jax.Array
Shape = tuple[int, ...]
Granularity = str | tuple[int, ...] | None
Leaf = ArrayLike | jax.ShapeDtypeStruct


@exportable
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Scaled:
    """A quantized array: entry i is `values[i] * scale[i // block] * total`.

    `quantize` makes one. The constructor wraps the values and scales of a checkpoint without a copy, and checks that
    they fit together. A `Scaled` is a pytree with the leaves values, scale and total; a transformation of JAX may put
    anything in their place. Comparison is by identity: `a == b` is `a is b`, as for other pytrees of arrays.

    Attributes:
      values: the low-precision values, in the dtype of the format.
      scale: one scale for each block, with as many axes as values. The last block of an axis may be shorter.
      format: the name of a format, such as "int8" or "mxfp8".
      block: the length of a block along each axis.
      total: a scalar that all scales are multiplied by, or None.

    >>> x = Scaled(jnp.array([[3, -1], [5, 2]], jnp.int8), jnp.array([[0.5], [2.0]]), "int8", (1, 2))
    >>> x
    Scaled(int8[2,2], scales float32[2,1] of blocks 1 x 2)
    >>> x.dequantize()
    Array([[ 1.5, -0.5],
           [10. ,  4. ]], dtype=float32)
    """

    values: Array
    scale: Array
    format: str
    block: Shape
    total: Array | None = None

    def __init__(
        self, values: Leaf, scale: Leaf, format: FormatLike, block: Sequence[int], total: Leaf | None = None
    ) -> None:
        kind, stored, scales = format_of(format), _leaf("values", values), _leaf("scale", scale)
        if stored.dtype != kind.values:
            raise TypeError(f"values: want {kind.values}, the dtype of {kind.name}; got {stored.dtype}")
        whole = jnp.float32(total) if isinstance(total, (int, float)) else total
        whole = None if whole is None else _leaf("total", whole)
        for name, leaf in (("scale", scales), ("total", whole)):
            if leaf is not None and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"{name}: want a float dtype; got {leaf.dtype}")
        lengths = _lengths(block, tuple(stored.shape))
        _check_shapes("", tuple(stored.shape), tuple(scales.shape), lengths, whole)
        self._fill(stored, scales, kind.name, lengths, whole)

    def _fill(self, *fields: Any) -> None:
        for field, value in zip(dataclasses.fields(self), fields, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def shape(self) -> Shape:
        """The shape of the array that this stands for, which is that of the values."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the values."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values as they are stored."""
        return self.values.dtype

    @property
    def wide(self) -> np.dtype[Any]:
        """The default dtype of products: that of the scales, where scales of 8 bits count as bfloat16."""
        scales = [x.dtype for x in (self.scale, self.total) if x is not None]
        return jnp.result_type(*(jnp.bfloat16 if bits(each) <= 8 else each for each in scales))

    @property
    def nbytes(self) -> int:
        """The bytes of values and scales, where two values of 4 bits share a byte."""
        leaves = [x for x in (self.values, self.scale, self.total) if x is not None]
        return sum(math.ceil(math.prod(x.shape) * bits(x.dtype) / 8) for x in leaves)

    @property
    def mT(self) -> Scaled:
        """The matrix transpose: the last two axes are exchanged."""
        if self.ndim < 2:
            raise ValueError(f"mT: want at least 2 dimensions; got shape {self.shape}")
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)

    def transpose(self, *axes: int) -> Scaled:
        """The array with its axes in another order, or in reverse if no order is given."""
        axes = axes or tuple(range(self.ndim))[::-1]
        block = tuple(self.block[axis] for axis in axes)
        return Scaled(self.values.transpose(axes), self.scale.transpose(axes), self.format, block, self.total)

    def merged(self, *counts: int) -> Scaled:
        """The array with neighbouring axes merged: new axis i replaces the next counts[i] axes; with 0 it has length 1.

        A block that would reach into the next row of a merged axis is cut into shorter blocks with the same scale.
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
        """A slice of the first axis, such as some of the groups, or one entry of it without that axis."""
        if not isinstance(at, (int, np.integer, slice)):
            raise TypeError(f"index: want an int or a slice of the first axis; got {type(at).__name__}")
        if not self.ndim:
            raise IndexError("index: a scalar has no first axis")
        which = at if isinstance(at, slice) else int(at)
        if isinstance(which, int) and not -self.shape[0] <= which < self.shape[0]:
            raise IndexError(f"index: want one below {self.shape[0]}, the length of the first axis; got {which}")
        shared = self.scale.shape[0] == 1
        if not shared and self.block[0] != 1:
            raise ValueError(f"index: blocks are {self.block[0]} long along the first axis; want 1, or all of it")
        values, block = self.values[which], self.block[1:]
        if isinstance(which, slice):
            block = (max(values.shape[0], 1) if shared else self.block[0], *block)
            return Scaled(values, self.scale if shared else self.scale[which], self.format, block, self.total)
        return Scaled(values, self.scale[0 if shared else which], self.format, block, self.total)

    __iter__ = None  # groups are taken by index; a Scaled is no sequence

    def scales(self) -> Array:
        """The float32 scale of each entry, in a shape that broadcasts against the values."""
        checked("Scaled", self)
        found = expanded(jnp.asarray(self.scale).astype(jnp.float32), self.block, self.shape)
        return found if self.total is None else found * self.total

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The array that this stands for: values times scales, computed in float32."""
        scales = self.scales()
        return (jnp.asarray(self.values).astype(jnp.float32) * scales).astype(dtype)

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], tuple[str, Shape]]:
        """The leaves values, scale and total, and the static format and block."""
        return (self.values, self.scale, self.total), (self.format, self.block)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, Any], ...], tuple[str, Shape]]:
        """The same as `tree_flatten`, with the names of the leaves for tree paths."""
        leaves, static = self.tree_flatten()
        return tuple(zip(map(GetAttrKey, ("values", "scale", "total")), leaves, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[str, Shape], leaves: Any) -> Scaled:
        """A Scaled of any leaves, unchecked: JAX puts in tracers, batched arrays, specs, None and bare objects."""
        made, (values, scale, total) = object.__new__(cls), leaves
        made._fill(values, scale, *static, total)
        return made

    def __repr__(self) -> str:
        leaves = [x for x in (self.values, self.scale, self.total) if x is not None]
        if self.values is None or self.scale is None or not all(hasattr(x, "dtype") for x in leaves):
            total = "" if self.total is None else f", total={self.total!r}"
            return f"Scaled({self.values!r}, {self.scale!r}, {self.format!r}, {self.block!r}{total})"
        name = "" if self.format == self.values.dtype.name else f"{self.format}: "
        total = "" if self.total is None else f", times a total {_typed(self.total)}"
        blocks = " x ".join(map(str, self.block)) or "1"
        return f"Scaled({name}{_typed(self.values)}, scales {_typed(self.scale)} of blocks {blocks}{total})"


def quantize(x: ArrayLike, format: FormatLike, granularity: Granularity = None) -> Scaled:
    """Quantize an array by absmax: the largest magnitude of each block becomes the largest value of the format.

    Block formats round their scales: "mxfp8" and "mxfp4" to the next power of two, "nvfp4" to float8_e4m3fn. Nothing
    finite becomes Inf, and a block with NaN or Inf becomes NaN. Scales are at least 2**-126, since XLA flushes smaller
    ones to zero.

    Args:
      x: a float array of any rank. It is quantized as float32.
      format: "int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn" or one of those as a dtype, such as
        `jnp.int8`; or a block format, "mxfp8", "mxfp4" or "nvfp4".
      granularity: the entries that share a scale. "tensor": all of them. "row": those along the last axis. "column":
        those along the last axis but one. "group": all but the first axis. Or the length of a block along each axis,
        where 0 is the whole axis: `(1, 128, 128)`, or `(0, 0, 1)` for one scale for each column of all groups. None
        is "tensor", or blocks along the last axis in a block format.

    Returns:
      A `Scaled`.

    >>> x = jnp.array([[1.0, -2.0, 0.5], [100.0, 0.0, 25.0]])
    >>> quantize(x, "int8", "row").values
    Array([[  64, -127,   32],
           [ 127,    0,   32]], dtype=int8)
    >>> quantize(jnp.ones((2, 64, 8)), "mxfp8", (1, 32, 1))  # weights [g, k, n], blocks along k
    Scaled(mxfp8: float8_e4m3fn[2,64,8], scales float8_e8m0fnu[2,2,8] of blocks 1 x 32 x 1)
    """
    return calibrated(x, format, granularity, lambda absmax: absmax)


def calibrated(x: ArrayLike, format: FormatLike, granularity: Granularity, bound: Callable[[Array], Array]) -> Scaled:
    """The same as `quantize`, with scales for `bound(absmax)` in place of the largest magnitude of each block."""
    kind, x = format_of(format), checked_floats("x", x)
    block = block_shape(kind, granularity, x.shape)
    absmax = bound(block_absmax(x, block))
    whole = jnp.max(jnp.where(jnp.isfinite(absmax), absmax, 0), initial=0) if kind.total else None
    return quantize_blocks(kind, x, block, absmax, whole)


def dequantize(x: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """The array that a `Scaled` stands for; for a `GroupedTensor` with quantized data, the tensor with float data.

    >>> dequantize(quantize(jnp.array([3.0, -1.5]), "float8_e4m3fn"))
    Array([ 3. , -1.5], dtype=float32)
    """
    if not hasattr(x, "dequantize"):
        raise TypeError(f"x: want a Scaled or a GroupedTensor; got {type(x).__name__}")
    return x.dequantize(dtype)


def quantize_blocks(kind: Format, x: Array, block: Shape, absmax: Array, whole: Array | None) -> Scaled:
    """Quantize float32 x, given the largest magnitude of each block and, for `total`, that of all blocks together."""
    total = None if whole is None else kind.total_of(whole)
    scale = kind.scale_of(absmax, total)
    spread = expanded(scale, block, x.shape)
    x = jnp.clip(x, -kind.reach, kind.reach)
    values = kind.rounded(x / (spread if total is None else spread * total))
    if total is not None and total.ndim:  # a Scaled has one total; several are multiplied into the scales
        return Scaled(values, scale * total, kind.name, block)
    return Scaled(values, scale.astype(kind.scales), kind.name, block, total)


def checked_floats(name: str, x: Any) -> Array:
    """An argument that must be a float array, as float32."""
    if x is None or isinstance(x, (str, Scaled)):
        raise TypeError(f"{name}: want an array of floats; got {type(x).__name__}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: want a float dtype; got {x.dtype}")
    return x.astype(jnp.float32)


def checked(name: str, x: Scaled) -> Scaled:
    """A Scaled whose leaves fit together, with scales that broadcast; JAX may have made it of any leaves.

    An array without entries needs no scales; it gets ones, as many as broadcast.
    """
    if not all(hasattr(leaf, "shape") for leaf in (x.values, x.scale)):
        raise TypeError(f"{name}: want a Scaled of arrays; got {x!r}")
    _check_shapes(f"{name}.", x.shape, tuple(x.scale.shape), x.block, x.total)
    if 0 not in x.shape:
        return x
    counts = [max(-(-size // length), 1) for size, length in zip(x.shape, x.block, strict=True)]
    return dataclasses.replace(x, scale=jnp.ones(counts, x.scale.dtype))


def _leaf(name: str, x: Any) -> Any:
    """An argument that must have a shape and a dtype; numpy arrays become those of JAX."""
    if isinstance(x, (np.ndarray, np.generic)):
        return jnp.asarray(x)
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: want an array, such as jnp.asarray(...) with a dtype; got {type(x).__name__}")
    return x


def _lengths(block: Any, shape: Shape) -> Shape:
    """The block lengths of a Scaled, as a tuple; 0 is taken for 1 along an axis without entries."""
    given = tuple(block) if isinstance(block, (tuple, list)) else ()
    numbers = all(isinstance(b, (int, np.integer)) and not isinstance(b, bool) for b in given)
    if not isinstance(block, (tuple, list)) or not numbers or len(given) != len(shape):
        raise ValueError(f"block: want {len(shape)} ints, the length of a block along each axis; got {block!r}")
    lengths = tuple(int(b) or (1 if size == 0 else 0) for b, size in zip(given, shape, strict=True))
    if min(lengths, default=1) < 1:
        raise ValueError(f"block: want lengths of at least 1; got {block!r}")
    return lengths


def _check_shapes(prefix: str, shape: Shape, scale: Shape, block: Shape, total: Any) -> None:
    """Raise unless there is a scale for each block of an array of this shape, and at most one total."""
    if len(block) != len(shape):
        raise ValueError(f"{prefix}block: want a length along each axis of values, shape {shape}; got {block}")
    want = tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
    bare = tuple(1 if size == 0 else count for size, count in zip(shape, want, strict=True))
    if tuple(scale) not in (want, bare):
        raise ValueError(f"{prefix}scale: want one for each block of {block}, shape {want}; got shape {tuple(scale)}")
    if total is not None and tuple(total.shape) != ():
        raise ValueError(f"{prefix}total: want a scalar; got shape {tuple(total.shape)}")


def expanded(scale: Array, block: Shape, shape: Shape) -> Array:
    """The scale of each entry of an array of this shape; an axis with one scale keeps length 1."""
    for axis, (length, size) in enumerate(zip(block, shape, strict=True)):
        if length > 1 and scale.shape[axis] > 1:
            scale = _repeated(scale, axis, length, size)
    return scale


def _joined(scale: Array, axis: int, shape: list[int], block: list[int]) -> tuple[Array, list[int]]:
    """The scales, and the length of a block, after an axis and the next one are merged."""
    if scale.shape[axis + 1] == 1:  # a block is made of whole rows of the second axis
        length = block[0] * shape[1]
    else:
        length = math.gcd(block[1], shape[1])
        scale = _repeated(scale, axis, block[0], shape[0])
        scale = _repeated(scale, axis + 1, block[1] // length, shape[1] // length)
    joined = (*scale.shape[:axis], scale.shape[axis] * scale.shape[axis + 1], *scale.shape[axis + 2 :])
    return scale.reshape(joined), [max(length, 1)]


def _repeated(scale: Array, axis: int, times: int, size: int) -> Array:
    """Each scale repeated along an axis, cut off at this size."""
    if times == 1:
        return scale
    return jax.lax.slice_in_dim(jnp.repeat(scale, times, axis=axis), 0, size, axis=axis)


def block_absmax(x: Array, block: Shape) -> Array:
    """The largest magnitude of each block; NaN for a block that contains NaN."""
    counts = [-(-size // length) for size, length in zip(x.shape, block, strict=True)]
    short = [(0, c * b - size) for c, b, size in zip(counts, block, x.shape, strict=True)]
    padded = jnp.pad(jnp.abs(x), short) if any(after for _, after in short) else jnp.abs(x)
    parts = padded.reshape([n for pair in zip(counts, block, strict=True) for n in pair])
    return parts.max(axis=tuple(range(1, parts.ndim, 2)), initial=0)


def block_shape(kind: Format, granularity: Granularity, shape: Shape) -> Shape:
    """The length of a block along each axis that a granularity means for a shape: at least 1, at most the axis."""
    ndim = len(shape)
    if kind.block and not ndim:
        raise ValueError(f"format: {kind.name} has blocks along an axis; want at least 1 dimension; got a scalar")
    if granularity is None:
        given: Any = (*(1,) * (ndim - 1), kind.block) if kind.block else (0,) * ndim
    elif isinstance(granularity, str):
        given = _named(granularity, ndim)
    else:
        given = tuple(granularity) if isinstance(granularity, (tuple, list)) else None
    if given is None or len(given) != ndim or not all(map(_is_length, given)):
        raise ValueError(f"granularity: want {ndim} lengths of blocks, where 0 is the whole axis; got {granularity!r}")
    if kind.block and sorted(given) != [*(1,) * (ndim - 1), kind.block]:
        raise ValueError(f"granularity: {kind.name} has blocks of {kind.block} along one axis; got {granularity!r}")
    return tuple(max(min(int(b) or size, size), 1) for b, size in zip(given, shape, strict=True))


def _is_length(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x >= 0)


def _named(name: str, ndim: int) -> Shape:
    """The block lengths that a named granularity means, where 0 is the whole axis."""
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


def _typed(x: Any) -> str:
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
