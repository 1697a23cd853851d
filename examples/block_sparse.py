"""A block-sparse matrix times a dense one, as one ragged contraction.

    out[r] = sum over the blocks (r, c) that are there of  block @ dense[c]

Lay the blocks of a block row side by side, and beside them the rows of `dense` they meet: then block row r is a group,
as wide as it has blocks. Rows of blocks with nothing in them are empty groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import trencadis

BLOCK = 16


class BlockSparse(NamedTuple):
    """Blocks that are there, block row after block row."""

    blocks: jax.Array  # [blocks, BLOCK, BLOCK]
    column: jax.Array  # [blocks]: the block column of each
    per_row: jax.Array  # [block rows]: how many each block row has


def matmul(a: BlockSparse, dense: jax.Array) -> jax.Array:
    """`[rows, columns] x [columns, n] -> [rows, n]`; work and memory go with the blocks that are there."""
    side_by_side = jnp.moveaxis(a.blocks, 0, 1).reshape(BLOCK, -1)  # [BLOCK, blocks * BLOCK]
    met = dense.reshape(-1, BLOCK, dense.shape[1])[a.column].reshape(-1, dense.shape[1])  # [blocks * BLOCK, n]
    out = trencadis.transposed_grouped_matmul(side_by_side, met, a.per_row * BLOCK)  # [block rows, BLOCK, n]
    return out.reshape(-1, dense.shape[1])


def random(rng: np.random.Generator, rows: int, columns: int, share: float) -> tuple[BlockSparse, np.ndarray]:
    """A random one, and the same as a dense matrix."""
    there = rng.random((rows, columns)) < share
    there[rows // 2] = False  # an empty row of blocks
    r, c = np.nonzero(there)
    blocks = rng.standard_normal((len(r), BLOCK, BLOCK), dtype=np.float32)
    dense = np.zeros((rows, BLOCK, columns, BLOCK), np.float32)
    dense[r, :, c, :] = blocks
    sparse = BlockSparse(jnp.asarray(blocks), jnp.asarray(c), jnp.asarray(there.sum(axis=1)))
    return sparse, dense.reshape(rows * BLOCK, columns * BLOCK)


def main() -> None:
    rng = np.random.default_rng(0)
    sparse, whole = random(rng, 6, 8, 0.3)
    x = rng.standard_normal((8 * BLOCK, 20), dtype=np.float32)
    np.testing.assert_allclose(jax.jit(matmul)(sparse, x), whole @ x, rtol=1e-4, atol=1e-4)
    print(f"{len(sparse.blocks)} blocks of 48, {sparse.per_row.tolist()} per row: equals the dense product")

    def loss(blocks: jax.Array) -> jax.Array:  # gradients come for the blocks that are there, and for no others
        return jnp.sum(matmul(sparse._replace(blocks=blocks), x) ** 2)

    print("gradient:", jax.jit(jax.grad(loss))(sparse.blocks).shape)


if __name__ == "__main__":
    main()
