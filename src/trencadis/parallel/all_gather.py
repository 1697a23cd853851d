"""The strategy "all_gather": every shard gets all tokens, computes those of its experts, and results are summed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from trencadis.moe.selection import picked
from trencadis.parallel.collectives import gather, reduce_scatter
from trencadis.parallel.rows import collect, fill, fill_entries, sorted_buffer
from trencadis.parallel.setting import Compute, Part, Setting, counts, send


def run(setting: Setting, compute: Compute, x: Array, experts: Array, weights: Array) -> Part:
    """The results of this shard's tokens, from all tokens, of which each shard computes those of its experts."""

    def spread(_: Any, x: Array) -> Array:
        return gather(x, setting.axis, ordered=setting.ordered)

    everything = send(spread, (), x, setting.dispatch)
    ids = spread((), experts) - lax.axis_index(setting.axis) * setting.local
    mine = (ids >= 0) & (ids < setting.local)
    ids, weights = jnp.where(mine, ids, setting.local), spread((), weights)
    if setting.capacity >= everything.shape[0] * min(ids.shape[1], setting.local):
        y, computed = _all(setting, compute, everything, ids, weights)
        dropped = jnp.zeros_like(computed[0])
    else:
        y, computed = _some(setting, compute, everything, ids, weights)
        dropped = jnp.sum(mine, dtype=jnp.int32) - jnp.sum(computed)
    return Part(reduce_scatter(y, setting.axis, ordered=setting.ordered), computed, dropped)


def _all(setting: Setting, compute: Compute, x: Array, ids: Array, weights: Array) -> tuple[Array, Array]:
    """The results of all tokens `[shards * t, d]`, of this shard's experts alone, and the rows of each of them."""
    if ids.shape[1] > setting.local:  # a token cannot go to more experts than there are: a column for each of them
        expert = jnp.arange(setting.local, dtype=jnp.int32)[None]
        hot = ids[:, None, :] == expert[:, :, None]  # [t, local, k]
        weights = picked(hot, weights) if hot.shape[1] else weights
        ids = jnp.where(hot.any(axis=2), expert, setting.local)
    return compute(x, ids, weights), counts(ids, setting.local)


def _some(setting: Setting, compute: Compute, x: Array, ids: Array, weights: Array) -> tuple[Array, Array]:
    """The same with room for `capacity` rows; those of later tokens are left out."""
    buffer = sorted_buffer(jnp.where(ids < setting.local, 0, 1), 1, setting.capacity)
    chosen = fill_entries(ids.astype(jnp.float32), buffer).astype(jnp.int32)
    chosen = jnp.where(buffer.row >= 0, chosen, setting.local)[:, None]
    y = compute(fill(x, buffer), chosen, fill_entries(weights, buffer)[:, None])
    return collect(y, buffer, x.shape[0]), counts(chosen, setting.local)
