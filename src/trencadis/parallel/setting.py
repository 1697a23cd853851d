"""What strategies share: the static description of a step, and the format in which tokens are sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from trencadis.core.dtypes import bits
from trencadis.parallel.collectives import Axis, from_bytes, to_bytes
from trencadis.quant.calibrate import quantize
from trencadis.quant.formats import Format, FormatLike, format_of
from trencadis.quant.scaled import Scaled

# the weighted results [rows, d] of this shard's experts: of rows [rows, d], experts and weights [rows, k]
Compute: TypeAlias = Callable[[Array, Array, Array], Array]
Move: TypeAlias = Callable[[Any, Array], Array]  # a linear function of rows, such as a collective, after constants


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The static description of one exchange of tokens."""

    axis: Axis
    shards: int
    local: int  # the number of experts of a shard
    capacity: int  # the most rows that a shard computes
    ordered: bool
    dispatch: Format | None  # of tokens on their way to the experts; None: the dtype of x


class Part(NamedTuple):
    """The result of some tokens of this shard, and how busy its experts were with those of all shards."""

    y: Float[Array, "t d"]
    rows: Int32[Array, " e"]  # computed by each expert of this shard
    dropped: Int32[Array, ""]  # assignments to these experts that were not computed


def counts(experts: Array, local: int) -> Array:
    """The number of assignments to each of `local` experts; other ids count nowhere."""
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(local, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32)


def dispatch_format(format: FormatLike | None) -> Format | None:
    """The format of tokens that are sent, one of 8 bits."""
    if format is None:
        return None
    try:
        found = format_of(format)
    except (ValueError, TypeError) as error:
        raise ValueError(f"dispatch: {error}") from None
    if bits(found.values) != 8 or found.total:
        raise ValueError(f"dispatch: want a format of 8 bits, such as 'float8_e4m3fn', or None; got {found.name!r}")
    return found


def send(move: Move, known: Any, x: Array, format: Format | None) -> Array:
    """`move(known, x)`, where x may be rounded to a format and moved as bytes and scales.

    The gradient is moved back as it is: rounding passes it on.
    """
    if format is None:
        return move(known, x)

    @jax.custom_jvp
    def rounded(known: Any, x: Array) -> Array:
        small = quantize(x, format, None if format.block else "row")
        leaves, static = small.tree_flatten()
        moved = (None if leaf is None else from_bytes(move(known, to_bytes(leaf)), leaf) for leaf in leaves)
        return Scaled.tree_unflatten(static, tuple(moved)).dequantize(x.dtype)

    @rounded.defjvp
    def _(primals: tuple[Any, Array], tangents: tuple[Any, Array]) -> tuple[Array, Array]:
        return rounded(*primals), move(primals[0], tangents[1])

    return rounded(lax.stop_gradient(known), x)
