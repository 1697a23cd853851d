"""Quantization by absmax: scales from the numbers of an array, blocks from a granularity, and the order of storage."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from trencadis.core import arguments
from trencadis.core.mesh import Axes, explicit_mesh, reshaped, resharded, spec_of
from trencadis.quant.blocks import Shape, expanded
from trencadis.quant.formats import Format, FormatLike, format_of
from trencadis.quant.scaled import Scaled

Array = jax.Array
Granularity = str | tuple[int, ...] | None


def quantize(
    x: ArrayLike, format: FormatLike, granularity: Granularity = None, *, contracting: int | None = None
) -> Scaled:
    """Quantize an array by absmax: the largest magnitude of each block becomes the largest value of the format.

    Block formats round their scales: "mxfp8" and "mxfp4" to the next power of two, "nvfp4" to float8_e4m3fn. Nothing
    finite becomes Inf, and a block with NaN or Inf becomes NaN. Scales are at least 2**-126, since XLA flushes smaller
    ones to zero. The result does not depend on the machine; `prepare`, called where weights are served, stores them in
    the order that this machine reads fastest.

    Args:
      x: a float array of any rank. It is quantized as float32.
      format: "int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn" or one of those as a dtype, such as
        `jnp.int8`; or a block format, "mxfp8", "mxfp4" or "nvfp4".
      granularity: the entries that share a scale. "tensor": all of them. "row": those along the last axis. "column":
        those along the last axis but one. "group": all but the first axis. Or the length of a block along each axis,
        where 0 is the whole axis: `(1, 128, 128)`, or `(0, 0, 1)` for one scale for each column of all groups. None
        is "tensor", or blocks along the last axis in a block format.
      contracting: the axis that products will sum over, one of the last two. It is stored last, as tensor cores want
        it; the shape stays that of x. By default it is the last axis of rows `[m, k]`, and of arrays whose blocks
        extend along the last axis alone, as those of "row" do; and otherwise the last but one, k of weights
        `[g, k, n]`. Weights `[g, n, k]` for transpose_rhs=True have contracting=-1.

    Returns:
      A `Scaled`.

    >>> x = jnp.array([[1.0, -2.0, 0.5], [100.0, 0.0, 25.0]])
    >>> quantize(x, "int8", "row").values
    Array([[  64, -127,   32],
           [ 127,    0,   32]], dtype=int8)
    >>> quantize(jnp.ones((2, 64, 8)), "mxfp8", (1, 32, 1))  # weights [g, k, n], blocks along k, stored [g, n, k]
    Scaled(mxfp8: float8_e4m3fn[2,64,8], scales float8_e8m0fnu[2,2,8] of blocks 1 x 32 x 1)
    """
    found = calibrated(x, format, granularity, lambda absmax: absmax)
    if contracting is None:
        contracting = -2 if found.ndim > 2 and (found.block[-2] > 1 or found.block[-1] == 1) else -1
    return ordered(found, contracting)


def ordered(x: Scaled, contracting: int) -> Scaled:
    """The same array, stored so that the contracted axis is the last; x itself if it is stored so."""
    whole = isinstance(contracting, (int, np.integer)) and not isinstance(contracting, bool)
    if not whole or contracting not in (-1, -2, x.ndim - 1, x.ndim - 2):
        raise ValueError(f"contracting: want one of the last two axes of shape {x.shape}; got {contracting!r}")
    transposed = x.ndim > 1 and int(contracting) % x.ndim == x.ndim - 2
    return x if x.transposed == transposed else dataclasses.replace(x, transposed=transposed)


def calibrated(
    x: ArrayLike, format: FormatLike, granularity: Granularity, bound: Callable[[Array], Array],
    of_all: Callable[[Array], Array] = lambda most: most,
) -> Scaled:  # fmt: skip
    """The same as `quantize`, with scales for `bound(absmax)` in place of the largest magnitude of each block.

    `of_all` is that of a whole array, of which x is a part, from that of x.
    """
    kind, x = format_of(format), checked_floats("x", x)
    block = block_shape(kind, granularity, x.shape)
    absmax = bound(block_absmax(x, block))
    whole = of_all(jnp.max(jnp.where(jnp.isfinite(absmax), absmax, 0), initial=0)) if kind.total else None
    return quantize_blocks(kind, x, block, absmax, whole)


# Called without jit, these two are still one program each: one pass over a large array, not a dozen.


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
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
    x = x if isinstance(x, (np.ndarray, jax.Array)) else arguments.as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: want a float dtype; got {x.dtype}")
    return jnp.asarray(x).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def block_absmax(x: Array, block: Shape) -> Array:
    """The largest magnitude of each block; NaN for a block that contains NaN."""
    mesh = explicit_mesh(x)
    if mesh is None:
        return _absmax_anywhere(x, block)
    # of the part of each block on a device first, so that shards of x stay where they are
    over = spec_of(jax.typeof(x).sharding, mesh, x.ndim)
    held = [size // math.prod(mesh.shape[axis] for axis in axes) for size, axes in zip(x.shape, over, strict=True)]
    part = tuple(b if b == size else math.gcd(b, n) for b, size, n in zip(block, x.shape, held, strict=True))
    found = _absmax_anywhere(x, part)
    if part == block:
        return found
    whole = spec_of(jax.typeof(found).sharding, mesh, x.ndim)
    found = resharded(found, mesh, [axes if a == b else () for axes, a, b in zip(whole, part, block, strict=True)])
    return _absmax_anywhere(found, tuple(b // a for a, b in zip(part, block, strict=True)))


def _absmax_anywhere(x: Array, block: Shape) -> Array:
    return lax.platform_dependent(x, cpu=lambda x: _absmax_on_cpu(x, block), default=lambda x: _absmax(x, block))


def _absmax(x: Array, block: Shape) -> Array:
    parts, along = _parts(jnp.abs(x), block)
    return parts.max(axis=along, initial=0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _absmax_on_cpu(x: Array, block: Shape) -> Array:
    """The same where XLA's maximum of many floats drops NaN.

    As integers, NaN is above Inf. Of whole axes, a maximum and a sum of floats are both faster, in loops of their own.
    """
    if any(1 < length < size for length, size in zip(block, x.shape, strict=True)):
        parts, along = _parts(lax.bitcast_convert_type(jnp.abs(x), jnp.int32), block)
        return lax.bitcast_convert_type(parts.max(axis=along, initial=0), jnp.float32)
    x, found = lax.optimization_barrier((x, _absmax(x, block)))
    parts, along = _parts(jnp.abs(x), block)
    return jnp.where(jnp.isnan(parts.sum(axis=along)), jnp.nan, found)


@_absmax_on_cpu.defjvp
def _(block: Shape, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _absmax_on_cpu(*primals, block), jax.jvp(lambda x: _absmax(x, block), primals, tangents)[1]


def _parts(x: Array, block: Shape) -> tuple[Array, tuple[int, ...]]:
    """The blocks of x, [count, length, count, length, ...] with zeros behind, and the axes along them."""
    counts = [-(-size // length) for size, length in zip(x.shape, block, strict=True)]
    short = [(0, c * b - size) for c, b, size in zip(counts, block, x.shape, strict=True)]
    padded = jnp.pad(x, short) if any(after for _, after in short) else x
    shape, along = [n for pair in zip(counts, block, strict=True) for n in pair], tuple(range(1, 2 * x.ndim, 2))
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return padded.reshape(shape), along
    # JAX does not find the sharding by itself, not even where `jax.vmap` has taken all explicit axes
    over = zip(spec_of(jax.typeof(x).sharding, mesh, x.ndim), counts, strict=True)
    spec = [each for axes, count in over for each in (((), axes) if count == 1 else (axes, ()))]
    return reshaped(padded, shape, mesh, tuple(spec)), along


def pmax_of_magnitudes(x: Array, axes: Axes) -> Array:
    """The largest of these float32 magnitudes over mesh axes, NaN where one is: as integers, NaN is above Inf."""
    if not axes:
        return x
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(x, jnp.int32), axes), jnp.float32)


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
