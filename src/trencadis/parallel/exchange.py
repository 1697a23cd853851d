"""The strategies "all_to_all" and "ragged": tokens travel to the shards of their experts, and results travel back.

    token x k   ->  rows sorted by shard  ->  sent  ->  rows by source  ->  experts  ->  sent back  ->  summed by token

A row travels with the id and the weight of its expert. "all_to_all" has a block of equal length for each pair of
shards; "ragged" sends as many rows as there are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from trencadis.core.jax_compat import vary_alike
from trencadis.core.linear import linear
from trencadis.moe.row_operations import take
from trencadis.parallel.collectives import Axis, swap_blocks
from trencadis.parallel.rows import SendBuffer, collect, fill, fill_entries, padded_buffer, sorted_buffer
from trencadis.parallel.setting import Compute, Part, Setting, counts, send


def padded(setting: Setting, compute: Compute, x: Array, experts: Array, weights: Array) -> Part:
    """The results of this shard's tokens by `lax.all_to_all`, with blocks of `capacity / shards` rows."""
    buffer = padded_buffer(_shards(setting, experts), setting.shards, setting.capacity // setting.shards)

    def dispatch(known: SendBuffer, x: Array) -> Array:
        return swap_blocks(fill(x, known), setting.axis)

    rows = send(dispatch, buffer, x, setting.dispatch)
    ids, scales = _unpacked(setting, swap_blocks(_packed(setting, buffer, experts, weights), setting.axis))
    y = swap_blocks(compute(rows, ids, scales), setting.axis)
    wanted = lax.psum_scatter(buffer.permutation.sizes, setting.axis)
    computed = counts(ids, setting.local)
    return Part(collect(y, buffer, x.shape[0]), computed, wanted - jnp.sum(computed))


def ragged(setting: Setting, compute: Compute, x: Array, experts: Array, weights: Array) -> Part:
    """The results of this shard's tokens by `lax.ragged_all_to_all`, into `capacity` rows."""
    buffer = sorted_buffer(_shards(setting, experts), setting.shards)
    most = min(x.shape[0] * min(experts.shape[1], setting.local), setting.capacity)
    sizes = lax.all_gather(buffer.permutation.sizes, setting.axis)  # [from, to]
    routes = routes_of(sizes, lax.axis_index(setting.axis), setting.capacity, most)
    here, there = buffer.row.shape[0], setting.capacity
    forth = functools.partial(exchange, setting.axis, most, (here, there))

    def dispatch(known: tuple[SendBuffer, Routes], x: Array) -> Array:
        return forth(known[1], fill(x, known[0]))

    rows = send(dispatch, (buffer, routes), x, setting.dispatch)
    ids, scales = _unpacked(setting, forth(routes, _packed(setting, buffer, experts, weights)))
    arrived = jnp.arange(there, dtype=jnp.int32)[:, None] < jnp.sum(routes.received)
    ids = jnp.where(arrived, ids, setting.local)
    y = compute(rows, ids, scales)
    y = exchange(setting.axis, most, (there, here), routes.reversed(), y)
    wanted = jnp.sum(take(sizes.T, lax.axis_index(setting.axis)))
    return Part(collect(y, buffer, x.shape[0]), counts(ids, setting.local), wanted - jnp.sum(routes.received))


def _shards(setting: Setting, experts: Array) -> Array:
    """The shard of each expert; the number of shards for no expert."""
    there = (experts >= 0) & (experts < setting.shards * setting.local)
    return jnp.where(there, experts // max(setting.local, 1), setting.shards)


def _packed(setting: Setting, buffer: SendBuffer, experts: Array, weights: Array) -> Array:
    """The expert, numbered within its shard, and the weight of each row, in one array [rows, 2] that travels."""
    ids = fill_entries((experts % max(setting.local, 1)).astype(jnp.float32), buffer)  # exact below 2**24 experts
    ids = jnp.where(buffer.row >= 0, ids, setting.local)
    return jnp.stack([lax.stop_gradient(ids), fill_entries(weights.astype(jnp.float32), buffer)], axis=1)


def _unpacked(setting: Setting, packed: Array) -> tuple[Array, Array]:
    return lax.stop_gradient(packed[:, :1]).astype(jnp.int32), packed[:, 1:]


# ---------------------------------------------------------------------------------------------------------------------
# Rows of uneven counts


class Routes(NamedTuple):
    """Where this shard has the rows that it sends to each peer, and those that it gets from it: i32[shards] each."""

    start: Int32[Array, " p"]  # of those that it sends: the first row here,
    sent: Int32[Array, " p"]  # their number,
    arrival: Int32[Array, " p"]  # and where the peer has the first of them
    place: Int32[Array, " p"]  # of those that it gets: the first row here,
    received: Int32[Array, " p"]  # their number,
    origin: Int32[Array, " p"]  # and where the peer had the first of them

    def reversed(self) -> Routes:
        """The routes of the same rows back to the shards that they came from."""
        return Routes(self.place, self.received, self.origin, self.start, self.sent, self.arrival)


def routes_of(sizes: Int32[Array, "p p"], shard: Array, capacity: int, most: int) -> Routes:
    """The routes of a shard, given how many rows each shard has for each other; beyond capacity, rows stay behind.

    Those of earlier shards come first, and `most` is a bound for one pair.
    """
    limited = jnp.minimum(sizes, most)
    before = jnp.cumsum(limited, axis=0, dtype=jnp.int32) - limited  # rows for the same shard from earlier ones
    kept = jnp.clip(capacity - before, 0, limited)
    arrival, start = jnp.minimum(before, capacity), jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes
    mine = [take(each, shard) for each in (start, kept, arrival)]
    theirs = [take(each.T, shard) for each in (arrival, kept, start)]
    return Routes(*mine, *theirs)


def exchange(axis: Axis, most: int, shape: tuple[int, int], routes: Routes, x: Array) -> Array:
    """Send rows [here, c] along routes into [there, c], with 0 where nothing arrives; its transpose is the way back."""
    here, there = shape

    def forth(routes: Routes, x: Array) -> Array:
        return _exchange(axis, most, there, routes, x)

    def back(routes: Routes, ct: Array) -> Array:
        return _exchange(axis, most, here, routes.reversed(), ct)

    return linear(forth, back, routes, x)


def _exchange(axis: Axis, most: int, rows: int, routes: Routes, x: Array) -> Array:
    """By `lax.ragged_all_to_all`, or on CPUs, which have none, by `lax.all_to_all` of blocks of `most` rows."""
    x, *numbers = vary_alike(x, *routes)

    def on_cpu(x: Array, *numbers: Array) -> Array:
        return _by_blocks(axis, most, rows, Routes(*numbers), x)

    def elsewhere(x: Array, *numbers: Array) -> Array:
        routes = Routes(*numbers)
        room, _ = vary_alike(jnp.zeros((rows, x.shape[1]), x.dtype), x)
        return lax.ragged_all_to_all(
            x, room, routes.start, routes.sent, routes.arrival, routes.received, axis_name=axis
        )

    return lax.platform_dependent(x, *numbers, cpu=on_cpu, default=elsewhere)


def _by_blocks(axis: Axis, most: int, rows: int, routes: Routes, x: Array) -> Array:
    at = jnp.arange(most, dtype=jnp.int32)
    index = jnp.where(at < routes.sent[:, None], routes.start[:, None] + at, 0)
    blocks = swap_blocks(take(x, index.reshape(-1)), axis)
    row = jnp.arange(rows, dtype=jnp.int32)
    peer = jnp.maximum(jnp.sum(row[:, None] >= routes.place, axis=1, dtype=jnp.int32) - 1, 0)
    behind = row - take(routes.place, peer)
    there = (behind >= 0) & (behind < take(routes.received, peer))
    found = take(blocks, jnp.where(there, peer * most + behind, 0))
    return jnp.where(there[:, None], found, jnp.zeros((), x.dtype))
