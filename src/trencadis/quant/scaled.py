"""`Scaled`: an array of low-precision values with a scale, and perhaps a zero point, for each block of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike, DTypeLike

from trencadis.core.dtypes import bits
from trencadis.core.interleave import deinterleave, interleave, interleaves, run_length
from trencadis.core.jax_compat import exportable
from trencadis.quant.blocks import Shape, expanded, merged, merged_shape
from trencadis.quant.formats import FormatLike, format_of

Array = jax.Array
Leaf = ArrayLike | jax.ShapeDtypeStruct
Static = tuple[str, Shape, bool, bool]  # format, block, transposed, interleaved

LEAVES = ("values", "scale", "total", "zeros")


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class _Fields:
    """The fields of a `Scaled`, which its constructor takes and `dataclasses.replace` changes."""

    values: Array
    scale: Array
    format: str
    block: Shape
    total: Array | None = None
    zeros: Array | None = None
    transposed: bool = False
    interleaved: bool = dataclasses.field(default=False, init=False)


@exportable
@jax.tree_util.register_pytree_with_keys_class
class Scaled(_Fields):
    """A quantized array: entry i is `(values[i] - zeros[i // block]) * scale[i // block] * total`.

    `quantize` makes one, and so do the loaders of checkpoints, such as `from_mxfp4`. The constructor wraps values and
    scales without a copy, and checks that they fit together. A `Scaled` is a pytree with the leaves values, scale,
    total and zeros, as they are stored; a transformation of JAX may put anything in their place. Comparison is by
    identity: `a == b` is `a is b`, as for other pytrees of arrays.

    Attributes:
      values: the low-precision values, in the dtype of the format.
      scale: one scale for each block, with as many axes as values. The last block of an axis may be shorter.
      format: the name of a format, such as "int8" or "mxfp8".
      block: the length of a block along each axis.
      total: a scalar that all scales are multiplied by, or None.
      zeros: one zero point for each block, shaped like scale and in the dtype of values, which are integers; or None.
      transposed: True if values, scale and zeros are stored with their last two axes exchanged, as `prepare` does it
        for weights. The shape and all other attributes are those of the array, whichever way it is stored.
      interleaved: True if values are stored interleaved along their last axis, as `interleave` and `prepare` do it. The
        constructor takes values in order.

    >>> x = Scaled(jnp.array([[3, -1], [5, 2]], jnp.int8), jnp.array([[0.5], [2.0]]), "int8", (1, 2))
    >>> x
    Scaled(int8[2,2], scales float32[2,1] of blocks 1 x 2)
    >>> x.dequantize()
    Array([[ 1.5, -0.5],
           [10. ,  4. ]], dtype=float32)
    >>> x.mT  # nothing is moved in memory
    Scaled(int8[2,2], scales float32[1,2] of blocks 2 x 1)
    """

    _stored: tuple[Any, Any, Any, Any]  # values, scale, total and zeros, as the pytree has them

    def __init__(
        self,
        values: Leaf,
        scale: Leaf,
        format: FormatLike,
        block: Sequence[int],
        total: Leaf | None = None,
        zeros: Leaf | None = None,
        transposed: bool = False,
    ) -> None:
        kind, stored, scales = format_of(format), _leaf("values", values), _leaf("scale", scale)
        if stored.dtype != kind.values:
            raise TypeError(f"values: want {kind.values}, the dtype of {kind.name}; got {stored.dtype}")
        whole = jnp.float32(total) if isinstance(total, (int, float)) else total
        whole = None if whole is None else _leaf("total", whole)
        for name, leaf in (("scale", scales), ("total", whole)):
            if leaf is not None and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"{name}: want a float dtype; got {leaf.dtype}")
        points = None if zeros is None else _zero_points(_leaf("zeros", zeros), stored.dtype)
        lengths = _lengths(block, tuple(stored.shape))
        if transposed and stored.ndim < 2:
            raise ValueError(f"transposed: want values of at least 2 dimensions; got shape {tuple(stored.shape)}")
        leaves = (stored, scales, whole, points)
        _check_shapes("", tuple(stored.shape), lengths, leaves)
        leaves = tuple(x if i == 2 else _exchanged(x) for i, x in enumerate(leaves)) if transposed else leaves
        self._fill((kind.name, lengths, bool(transposed), False), leaves)

    def _fill(self, static: Static, leaves: Any) -> None:
        fields = zip(("format", "block", "transposed", "interleaved", "total"), (*static, leaves[2]), strict=True)
        for name, value in (*fields, ("_stored", tuple(leaves))):
            object.__setattr__(self, name, value)

    def _leaf(self, at: int) -> Any:
        return _exchanged(self._stored[at]) if self.transposed else self._stored[at]

    @property
    def values(self) -> Array:
        """The low-precision values, with the shape of the array, in order; what is stored otherwise is moved."""
        values = _in_order(self._stored[0]) if self.interleaved else self._stored[0]
        return _exchanged(values) if self.transposed else values

    @property
    def stored(self) -> Array:
        """The values as they are stored: transposed, or interleaved along the last axis, as the attributes say."""
        return self._stored[0]

    @property
    def scale(self) -> Array:
        """One scale for each block of the array."""
        return self._leaf(1)

    @property
    def zeros(self) -> Array | None:
        """One zero point for each block of the array, or None."""
        return self._leaf(3)

    @property
    def shape(self) -> Shape:
        """The shape of the array that this stands for, which is that of the values."""
        shape = tuple(self._stored[0].shape)
        return _swapped(shape) if self.transposed else shape

    @property
    def ndim(self) -> int:
        """The number of axes of the values."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values as they are stored."""
        return self._stored[0].dtype

    @property
    def wide(self) -> np.dtype[Any]:
        """The default dtype of products: that of the scales, where scales of 8 bits count as bfloat16."""
        scales = [x.dtype for x in self._stored[1:3] if x is not None]
        return jnp.result_type(*(jnp.bfloat16 if bits(each) <= 8 else each for each in scales))

    @property
    def nbytes(self) -> int:
        """The bytes of values, scales and zero points, where two values of 4 bits share a byte."""
        leaves = [x for x in self._stored if x is not None]
        return sum(math.ceil(math.prod(x.shape) * bits(x.dtype) / 8) for x in leaves)

    @property
    def mT(self) -> Scaled:
        """The matrix transpose: the last two axes are exchanged. Nothing is moved in memory."""
        if self.ndim < 2:
            raise ValueError(f"mT: want at least 2 dimensions; got shape {self.shape}")
        return Scaled.tree_unflatten(
            (self.format, _swapped(self.block), not self.transposed, self.interleaved), self._stored
        )

    def interleave(self, interleaved: bool = True) -> Scaled:
        """The same array with its values stored interleaved along their last axis, or in order.

        The kernel for Hopper GPUs reads interleaved weights fastest. The axis must have a multiple of 32 entries of 4
        bits, or of 16 of 8.

        >>> w = Scaled(jnp.arange(16, dtype=jnp.int8), jnp.array([0.5]), "int8", (16,)).interleave()
        >>> w.interleaved, w.stored[:4].tolist(), w.values[:4].tolist()
        (True, [0, 8, 1, 9], [0, 1, 2, 3])
        """
        if interleaved == self.interleaved:
            return self
        values = _interleaved(self._stored[0], self.transposed) if interleaved else _in_order(self._stored[0])
        static = (self.format, self.block, self.transposed, bool(interleaved))
        return Scaled.tree_unflatten(static, (values, *self._stored[1:]))

    def transpose(self, *axes: int) -> Scaled:
        """The array with its axes in another order, or in reverse if no order is given.

        >>> w = Scaled(jnp.ones((4, 6, 2), jnp.int8), jnp.ones((4, 3, 2)), "int8", (1, 2, 1))
        >>> w.transpose(1, 0, 2).shape, w.transpose(1, 0, 2).block
        ((6, 4, 2), (2, 1, 1))
        """
        axes = tuple(axis % self.ndim for axis in axes) if axes else tuple(range(self.ndim))[::-1]
        if self.ndim >= 2 and axes == _swapped(tuple(range(self.ndim))):
            return self.mT
        block = tuple(self.block[axis] for axis in axes)
        leaves = [None if x is None else x.transpose(axes) for x in (self.values, self.scale, self.zeros)]
        return Scaled.tree_unflatten((self.format, block, False, False), (*leaves[:2], self.total, leaves[2]))

    def merged(self, *counts: int) -> Scaled:
        """The array with neighbouring axes merged: new axis i replaces the next counts[i] axes; with 0 it has length 1.

        A block that would reach into the next row of a merged axis is cut into shorter blocks with the same scale.

        >>> w = Scaled(jnp.ones((4, 6, 2), jnp.int8), jnp.ones((4, 3, 2)), "int8", (1, 2, 1))
        >>> w.merged(2, 1).shape, w.merged(2, 1).block
        ((24, 2), (2, 1))
        """
        if all(count == 1 for count in counts):
            return self
        shape, values = self.shape, self.values
        scale, block = merged(self.scale, shape, self.block, counts)
        zeros = self.zeros
        if zeros is not None:
            zeros = merged(zeros.astype(jnp.int32), shape, self.block, counts)[0].astype(zeros.dtype)
        return Scaled(values.reshape(merged_shape(shape, counts)), scale, self.format, block, self.total, zeros)

    def __getitem__(self, at: int | slice) -> Scaled:
        """A slice of the first axis, such as some of the groups, or one entry of it without that axis."""
        if not isinstance(at, (int, np.integer, slice)):
            raise TypeError(f"index: want an int or a slice of the first axis; got {type(at).__name__}")
        if not self.ndim:
            raise IndexError("index: a scalar has no first axis")
        which = at if isinstance(at, slice) else int(at)
        if isinstance(which, int) and not -self.shape[0] <= which < self.shape[0]:
            raise IndexError(f"index: want one below {self.shape[0]}, the length of the first axis; got {which}")
        whole = self._stored[1].shape[0] == 1 if self.ndim > 2 else self.scale.shape[0] == 1
        if not whole and self.block[0] != 1:
            raise ValueError(f"index: blocks are {self.block[0]} long along the first axis; want 1, or all of it")
        ordered = self.ndim > 2  # the order of the other axes is kept
        values, scale, _, zeros = self._stored if ordered else (self.values, self.scale, None, self.zeros)
        part = values[which]
        shared = slice(None) if isinstance(which, slice) else 0
        scale, zeros = (None if x is None else x[shared if whole else which] for x in (scale, zeros))
        block = self.block[1:]
        if isinstance(which, slice):
            block = (max(part.shape[0], 1) if whole else self.block[0], *block)
        order = (self.transposed, self.interleaved) if ordered else (False, False)
        return Scaled.tree_unflatten((self.format, block, *order), (part, scale, self.total, zeros))

    __iter__ = None  # groups are taken by index; a Scaled is no sequence

    def scales(self) -> Array:
        """The float32 scale of each entry, in a shape that broadcasts against the values.

        >>> Scaled(jnp.array([6, -3, 2, 1], jnp.int8), jnp.array([0.5, 2.0]), "int8", (2,)).scales().tolist()
        [0.5, 0.5, 2.0, 2.0]
        """
        checked("Scaled", self)
        found = expanded(jnp.asarray(self.scale).astype(jnp.float32), self.block, self.shape)
        return found if self.total is None else found * self.total

    def centered(self, dtype: DTypeLike) -> Array:
        """The values minus their zero points, in a dtype that holds the differences.

        >>> x = Scaled(jnp.array([6, -3], jnp.int8), jnp.ones(1), "int8", (2,), zeros=jnp.array([1], jnp.int8))
        >>> x.centered(jnp.int32).tolist()
        [5, -4]
        """
        values = jnp.asarray(self.values).astype(dtype)
        if self.zeros is None:
            return values
        return values - expanded(jnp.asarray(self.zeros).astype(dtype), self.block, self.shape)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The array that this stands for: values minus zero points, times scales, computed in float32.

        >>> Scaled(jnp.array([6, -3], jnp.int8), jnp.array([0.5]), "int8", (2,)).dequantize().tolist()
        [3.0, -1.5]
        """
        return _dequantized(checked("Scaled", self), jnp.dtype(dtype))

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any, Any], Static]:
        """The leaves values, scale, total and zeros as they are stored, and the static format, block and order."""
        return self._stored, (self.format, self.block, self.transposed, self.interleaved)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, Any], ...], Static]:
        """The same as `tree_flatten`, with the names of the leaves for tree paths."""
        leaves, static = self.tree_flatten()
        return tuple(zip(map(GetAttrKey, LEAVES), leaves, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: Static, leaves: Any) -> Scaled:
        """A Scaled of any leaves, unchecked: JAX puts in tracers, batched arrays, specs, None and bare objects."""
        made = object.__new__(cls)
        made._fill(static, leaves)
        return made

    def __repr__(self) -> str:
        leaves = [x for x in self._stored if x is not None]
        if any(x is None for x in self._stored[:2]) or not all(hasattr(x, "dtype") for x in leaves):
            named = zip(LEAVES[2:], self._stored[2:], strict=True)
            others = "".join(f", {name}={x!r}" for name, x in named if x is not None)
            return f"Scaled({self._stored[0]!r}, {self._stored[1]!r}, {self.format!r}, {self.block!r}{others})"
        values = jax.ShapeDtypeStruct(self._stored[0].shape, self.dtype)  # nothing is put in order for it
        values = _exchanged(values) if self.transposed else values
        typed = [None if x is None else _typed(x) for x in (values, self.scale, self.zeros)]
        name = "" if self.format == self.dtype.name else f"{self.format}: "
        total = "" if self.total is None else f", times a total {_typed(self.total)}"
        zeros = "" if typed[2] is None else f" and zero points {typed[2]}"
        blocks = " x ".join(map(str, self.block)) or "1"
        return f"Scaled({name}{typed[0]}, scales {typed[1]}{zeros} of blocks {blocks}{total})"


@functools.partial(jax.jit, static_argnums=1, inline=True)  # one program where the caller has no jit
def _dequantized(x: Scaled, dtype: np.dtype[Any]) -> Array:
    if x.transposed:
        return jnp.matrix_transpose(x.mT.dequantize(dtype))
    return (x.centered(jnp.float32) * x.scales()).astype(dtype)


def dequantize(x: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """The array that a `Scaled` stands for; for a `GroupedTensor` with quantized data, the tensor with float data.

    >>> dequantize(Scaled(jnp.array([6, -3], jnp.int8), jnp.array([0.5]), "int8", (2,)))
    Array([ 3. , -1.5], dtype=float32)
    """
    if not hasattr(x, "dequantize"):
        raise TypeError(f"x: want a Scaled or a GroupedTensor; got {type(x).__name__}")
    return x.dequantize(dtype)


def checked(name: str, x: Scaled) -> Scaled:
    """A Scaled whose leaves fit together, with scales that broadcast; JAX may have made it of any leaves.

    An array without entries needs no scales; it gets ones, as many as broadcast.
    """
    (values, scale, total, zeros), (format, block, transposed, interleaved) = x.tree_flatten()
    if not all(hasattr(leaf, "shape") for leaf in (values, scale)):
        raise TypeError(f"{name}: want a Scaled of arrays; got {x!r}")
    block = _swapped(block) if transposed else block
    _check_shapes(f"{name}.", tuple(values.shape), block, (values, scale, total, zeros))
    if 0 not in values.shape:
        return x
    counts = [max(-(-size // length), 1) for size, length in zip(values.shape, block, strict=True)]
    zeros = None if zeros is None else jnp.zeros(counts, zeros.dtype)
    static = (format, x.block, transposed, interleaved)
    return Scaled.tree_unflatten(static, (values, jnp.ones(counts, scale.dtype), total, zeros))


def _interleaved(values: Any, transposed: bool) -> Any:
    """Values interleaved along the last axis, which is the last but one of the array if it is stored transposed.

    A description of values stays as it is.
    """
    if not values.ndim or not interleaves(values.dtype, values.shape[-1]):
        want = f"a multiple of {run_length(values.dtype)} entries along axis {-1 - transposed}, which is stored last"
        got = _swapped(tuple(values.shape)) if transposed else tuple(values.shape)
        raise ValueError(f"interleaved: want {want}; got shape {got}")
    return interleave(values) if isinstance(values, (jax.Array, np.ndarray)) else values


def _in_order(values: Any) -> Any:
    """Interleaved values in order along the last axis; what is no array stays as it is."""
    return deinterleave(values) if isinstance(values, (jax.Array, np.ndarray)) else values


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


def _zero_points(zeros: Any, dtype: Any) -> Any:
    """The zero points of integer values, in the dtype of these."""
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"zeros: want values of integers; got {dtype}, which has no zero points")
    if zeros.dtype != dtype:
        raise TypeError(f"zeros: want {dtype}, the dtype of values; got {zeros.dtype}")
    return zeros


def _check_shapes(prefix: str, shape: Shape, block: Shape, leaves: tuple[Any, ...]) -> None:
    """Raise unless there are a scale and a zero point for each block of an array of this shape, and at most one total.

    The leaves are values, scale, total and zeros.
    """
    if len(block) != len(shape):
        raise ValueError(f"{prefix}block: want a length along each axis of values, shape {shape}; got {block}")
    want = tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
    bare = tuple(1 if size == 0 else count for size, count in zip(shape, want, strict=True))
    _, scale, total, zeros = leaves
    for name, x in (("scale", scale), ("zeros", zeros)):
        if x is not None and tuple(x.shape) not in (want, bare):
            got = tuple(x.shape)
            raise ValueError(f"{prefix}{name}: want one for each block of {block}, shape {want}; got shape {got}")
    if total is not None and tuple(total.shape) != ():
        raise ValueError(f"{prefix}total: want a scalar; got shape {tuple(total.shape)}")


def _swapped(x: Shape) -> Shape:
    return (*x[:-2], x[-1], x[-2])


def _exchanged(x: Any) -> Any:
    """A leaf with its last two axes exchanged; one that is no array is itself."""
    if isinstance(x, jax.ShapeDtypeStruct) and len(x.shape) >= 2:
        return jax.ShapeDtypeStruct(_swapped(x.shape), x.dtype)
    return x.swapaxes(-1, -2) if hasattr(x, "swapaxes") and x.ndim >= 2 else x


def _typed(x: Any) -> str:
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
