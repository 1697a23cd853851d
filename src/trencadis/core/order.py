"""The order in which a CPU computes: what XLA may do at any time, it does as early as it can, with all arrays alive.

Its temporary arrays are new memory in each call, and the first write to each page of them takes longer than the
arithmetic of the page. Accelerators are left to their compilers, which hide communication behind what comes later.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Integer, Shaped

from trencadis.core.jax_compat import vary_alike
from trencadis.core.mesh import is_local


def after(x: Integer[Array, "*shape"], *others: Array) -> Integer[Array, "*shape"]:
    """The integers x, which a CPU has when it has computed the other arrays, and all that it computes from x."""
    if not others or not is_local(x, *others) or not all(each.size for each in others):
        return x

    def waiting(x: Array, *others: Array) -> Array:
        return x + hidden_zero(*others, dtype=x.dtype)

    x, *known = vary_alike(x, *map(lax.stop_gradient, others))
    return lax.platform_dependent(x, *known, cpu=waiting, default=lambda x, *_: x)


def hidden_zero(*xs: Array, nth: int = 0, dtype: DTypeLike = np.int32) -> Shaped[Array, ""]:
    """0, made of an element of each array, none of which is empty, in a way that XLA does not see through.

    Zeros of different `nth` are different to XLA.
    """
    some = [lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim)) for x in xs]
    some = [(x.real if jnp.iscomplexobj(x) else x).astype(jnp.float32) for x in some]
    others = some[1:] if nth == 0 and len(some) > 1 else [*some[1:], jnp.float32(1 + nth)]
    total = sum(others[1:], others[0])
    return ((some[0] < total) & (some[0] > total)).astype(dtype)
