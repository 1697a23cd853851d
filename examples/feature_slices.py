"""Heads that each read their own slice of the features, with uneven widths, as one ragged contraction.

    out[h] = x[:, s_h:e_h] @ w[s_h:e_h]        [tokens, features] x [features, n] -> [heads, tokens, n]

The slices are consecutive along the features, which is the contracted axis: they are the groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import trencadis


def heads(x: jax.Array, w: jax.Array, widths: jax.Array) -> jax.Array:
    """Contract each slice of features: `[tokens, features] x [features, n] -> [heads, tokens, n]`."""
    return trencadis.transposed_grouped_matmul(x, w, widths)


def main() -> None:
    rng = np.random.default_rng(0)
    widths = [8, 40, 0, 16]
    x = rng.standard_normal((24, 64), dtype=np.float32)
    w = rng.standard_normal((64, 10), dtype=np.float32)
    out = jax.jit(heads)(x, w, jnp.array(widths))
    ends = np.cumsum(widths)
    by_hand = np.stack([x[:, e - n : e] @ w[e - n : e] for e, n in zip(ends, widths, strict=True)])
    np.testing.assert_allclose(out, by_hand, rtol=1e-4, atol=1e-4)
    print("heads:", out.shape, "equal one matmul per slice; a head of width 0 gives 0")


if __name__ == "__main__":
    main()
