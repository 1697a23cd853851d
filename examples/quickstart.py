"""Three uneven groups of rows, each with its own matrix: the value, the gradients, and unowned rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import trencadis


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (300, 64))  # 300 rows ...
    w = jax.random.normal(keys[1], (3, 64, 32))  # ... 3 matrices
    sizes = jnp.array([100, 150, 50])  # rows 0-99 use w[0], rows 100-249 use w[1], the rest w[2]

    y = trencadis.grouped_matmul(x, w, sizes)
    by_hand = np.concatenate([x[:100] @ w[0], x[100:250] @ w[1], x[250:] @ w[2]])
    np.testing.assert_allclose(y, by_hand, rtol=1e-4, atol=1e-4)
    print("value:", y.shape, "equals three matmuls")

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(trencadis.grouped_matmul(x, w, sizes)))

    d_x, d_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    print("gradients:", d_x.shape, d_w.shape)

    # the sizes sum to 200, so the last 100 rows are unowned, and their result is 0
    short = trencadis.grouped_matmul(x, w, jnp.array([100, 0, 100]))
    assert not short[200:].any()
    print("unowned rows: 0")


if __name__ == "__main__":
    main()
