"""A block-sparse matrix times a dense matrix, as one ragged contraction.

    out[r] = sum over the nonzero blocks (r, c) of  block @ dense[c]

Concatenate the blocks of each block row, and gather the rows of `dense` that they are multiplied with. Then block row r
is a group whose size is proportional to its number of blocks. Block rows without blocks are empty groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import trencadis

BLOCK = 16


class BlockSparse(NamedTuple):
    """The nonzero blocks of a block-sparse matrix, in order of block rows."""

    blocks: jax.Array  # [blocks, BLOCK, BLOCK]
    column: jax.Array  # [blocks]: the block column of each block
    per_row: jax.Array  # [block rows]: the number of blocks in each block row


def matmul(a: BlockSparse, dense: jax.Array) -> jax.Array:
    """`[rows, columns] x [columns, n] -> [rows, n]`; work and memory are proportional to the nonzero blocks."""
    blocks = jnp.moveaxis(a.blocks, 0, 1).reshape(BLOCK, -1)  # [BLOCK, blocks * BLOCK]
    gathered = dense.reshape(-1, BLOCK, dense.shape[1])[a.column].reshape(-1, dense.shape[1])  # [blocks * BLOCK, n]
    out = trencadis.transposed_grouped_matmul(blocks, gathered, a.per_row * BLOCK)  # [block rows, BLOCK, n]
    return out.reshape(-1, dense.shape[1])


def random(rng: np.random.Generator, rows: int, columns: int, share: float) -> tuple[BlockSparse, np.ndarray]:
    """Return a random block-sparse matrix, and the same matrix in dense form."""
    nonzero = rng.random((rows, columns)) < share
    nonzero[rows // 2] = False  # an empty block row
    r, c = np.nonzero(nonzero)
    blocks = rng.standard_normal((len(r), BLOCK, BLOCK), dtype=np.float32)
    dense = np.zeros((rows, BLOCK, columns, BLOCK), np.float32)
    dense[r, :, c, :] = blocks
    sparse = BlockSparse(jnp.asarray(blocks), jnp.asarray(c), jnp.asarray(nonzero.sum(axis=1)))
    return sparse, dense.reshape(rows * BLOCK, columns * BLOCK)


def main() -> None:
    rng = np.random.default_rng(0)
    sparse, whole = random(rng, 6, 8, 0.3)
    x = rng.standard_normal((8 * BLOCK, 20), dtype=np.float32)
    np.testing.assert_allclose(jax.jit(matmul)(sparse, x), whole @ x, rtol=1e-4, atol=1e-4)
    print(f"{len(sparse.blocks)} blocks of 48, {sparse.per_row.tolist()} per row: equals the dense product")

    def loss(blocks: jax.Array) -> jax.Array:  # only nonzero blocks have gradients
        return jnp.sum(matmul(sparse._replace(blocks=blocks), x) ** 2)

    print("gradient:", jax.jit(jax.grad(loss))(sparse.blocks).shape)


if __name__ == "__main__":
    main()
