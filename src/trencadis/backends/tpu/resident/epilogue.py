"""What follows the products: `alpha * product + bias + beta * existing`, in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import LANES, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.ragged.flat import tail_of
from trencadis.backends.tpu.resident.sizes import CHUNK
from trencadis.backends.tpu.resident.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The flat result and what is added to it: its length and dtype, the number of groups, which steps there are."""

    length: int
    dtype: np.dtype[Any]
    groups: int
    accumulate: bool = False
    alpha: bool = False
    beta: bool = False
    bias: int = 0  # columns of a bias; 0: there is none

    @property
    def bias_rows(self) -> int:
        """The vectors of a group's bias in memory."""
        return round_up(-(-self.bias // LANES), CHUNK)

    def operands(self, extras: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The operands of the kernel: `extras` are existing, alpha f32[g], bias f32[g, n] and beta f32[g], as given."""
        found: dict[str, jax.Array] = {}
        if self.alpha or self.beta:
            ones = jnp.ones((self.groups,), jnp.float32)
            found["numbers"] = jnp.concatenate([extras.get(name, ones) for name in ("alpha", "beta")])
        if self.bias:
            padded = jnp.pad(extras["bias"], ((0, 0), (0, self.bias_rows * LANES - self.bias)))
            found["bias"] = padded.reshape(-1, LANES)
        if self.accumulate:
            found |= {"existing": extras["existing"], "existing_tail": tail_of(extras["existing"])}
        return found

    def fetch_bias(self, table: Table, entry: Index, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> None:
        """Copy the bias of an entry's group to VMEM."""
        first = table.field("group", entry) * i32(self.bias_rows)
        source = hbm["bias"].at[aligned_ds(first, self.bias_rows, CHUNK)]
        copy = pltpu.make_async_copy(source, vmem["bias"], vmem["bias_sem"])
        copy.start()
        copy.wait()

    def scaling(
        self, table: Table, entry: Index, chunk: Index, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> Callable[[Value], Value]:
        """The function from eight vectors of a row of the product to the same, times alpha and with the bias."""
        group = table.field("group", entry)
        alpha = hbm["numbers"][group] if self.alpha else None
        bias = None
        if self.bias:
            first = jnp.minimum(chunk * i32(CHUNK), i32(self.bias_rows - CHUNK))
            bias = vmem["bias"][aligned_ds(first, CHUNK, CHUNK), :]

        def scale(value: Value) -> Value:
            value = value if alpha is None else value * alpha
            return value if bias is None else value + bias

        return scale

    def adding(self, table: Table, entry: Index, hbm: dict[str, Ref]) -> Callable[[Value, Value], Value]:
        """The function from sums and existing values of an entry, both float32, to the result."""
        beta = hbm["numbers"][i32(self.groups) + table.field("group", entry)] if self.beta else None

        def add(value: Value, existing: Value) -> Value:
            if not self.accumulate:
                return value
            if beta is not None:
                existing = jnp.where(beta != 0, existing * beta, jnp.float32(0))
            return value + existing

        return add
