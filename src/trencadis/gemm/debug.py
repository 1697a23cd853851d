"""Checks of grouped tensors whose sizes are known only at run time; off unless `debug_checks` is on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import checkify

from trencadis.core import problem as what
from trencadis.core.debug import checking, fit, past
from trencadis.gemm.tensor import GroupedTensor


def check_tensor(name: str, tensor: GroupedTensor, dims: tuple[str, str]) -> None:
    """The checks of a grouped tensor where its sizes i32[g] are traced; dims are what its first and last are called."""
    given = zip(dims, (tensor.first_dims, tensor.last_dims), strict=True)
    ragged = {said: sizes for said, sizes in given if sizes is not None}
    if not checking() or all(what.concrete(sizes) is not None for sizes in ragged.values()):
        return
    for said, sizes in ragged.items():
        worst = jnp.argmin(sizes)
        size = jnp.asarray(sizes)[worst]
        checkify.check(size >= 0, f"{said}: group {{i}} has size {{size}}; sizes must be >= 0", i=worst, size=size)
    if len(ragged) == 2:
        said, room, places = name, tensor.shape[0], "entries"
        rows, columns = (jnp.maximum(sizes, 0) for sizes in ragged.values())
        sizes = jnp.where(rows > room // jnp.maximum(columns, 1), past(room), rows * columns)  # which might wrap
    else:
        (said, sizes), by_rows = next(iter(ragged.items())), tensor.last_dims is None
        room, places = (tensor.shape[0], "rows") if by_rows else (tensor.shape[-1], "columns")
    fits, over = fit(jnp.asarray(sizes), room)
    message = f"{said}: group {{i}} ends past the {{room}} {places} of {name}; want room for all groups"
    checkify.check(fits, message, i=over, room=jnp.int32(room))


def check_same(name: str, sizes: Any, other: str, others: Any) -> None:
    """That two tensors have groups of the same sizes i32[g], where either is traced."""
    known = what.concrete(sizes) is not None and what.concrete(others) is not None
    if not checking() or known or sizes.shape != others.shape:
        return
    one, two = jnp.asarray(sizes), jnp.asarray(others)
    i = jnp.argmax(one != two)
    checkify.check(
        one[i] == two[i],
        f"{name}: group {{i}} has size {{one}}, and {{two}} in {other}; want the same",
        i=i,
        one=one[i],
        two=two[i],
    )
