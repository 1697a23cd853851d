"""Sums over columns as the threads of a warpgroup compute them: MLIR operations stand for numpy's on all threads."""

import contextlib
import operator
import types

import numpy as np
import pytest

from trencadis.backends.gpu import registers

pytestmark = pytest.mark.core

THREADS = np.arange(128)


def stand_ins():
    """Modules whose values are arrays with an entry for each thread; what is stored must have been NaN before."""
    masks = []

    @contextlib.contextmanager
    def when(mask):
        masks.append(mask)
        yield
        masks.pop()

    def store(x, to, place):
        for thread in THREADS[masks[-1]]:
            at = tuple(int(index[thread]) for index in place)
            assert np.isnan(to[at])  # nothing is stored twice
            to[at] = x[thread]

    arith = types.SimpleNamespace(
        remui=operator.mod, divui=operator.floordiv, muli=operator.mul, addi=operator.add, andi=operator.and_,
        addf=operator.add, select=np.where, cmpi=lambda how, a, b: how(a, b), index_castui=lambda _, x: x,
        CmpIPredicate=types.SimpleNamespace(eq=operator.eq, ne=operator.ne, sge=operator.ge, slt=operator.lt),
    )  # fmt: skip
    utils = types.SimpleNamespace(
        c=lambda number, _: number, thread_idx=lambda: THREADS + 128, when=when,
        shfl_bfly=lambda x, distance: x[THREADS ^ distance],
    )  # fmt: skip
    kind = types.SimpleNamespace(get_signless=lambda _: None, get=lambda: None)
    return {
        "arith": arith, "utils": utils, "ir": types.SimpleNamespace(IntegerType=kind, IndexType=kind),
        "vector": types.SimpleNamespace(extract=lambda x, _, at: x[:, at[0]]),
        "memref": types.SimpleNamespace(store=store),
    }  # fmt: skip


def in_registers(matrix):
    """A matrix [64, n] as wgmma leaves it: lanes of a quad have pairs of columns, quads have rows, warps have 16."""
    warp, lane = THREADS // 32, THREADS % 32
    held = np.empty((1, matrix.shape[1] // 8, 1, 1, 2, 1, 1, 1, 1), object)
    for block in range(matrix.shape[1] // 8):
        for half in range(2):
            row, column = 16 * warp + 8 * half + lane // 4, 8 * block + 2 * (lane % 4)
            held[0, block, 0, 0, half, 0, 0, 0, 0] = np.stack([matrix[row, column], matrix[row, column + 1]], axis=1)
    return types.SimpleNamespace(registers=held)


@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_every_warp_stores_the_sums_of_its_rows(monkeypatch, columns):
    matrix, out = np.random.default_rng(0).normal(size=(64, columns)), np.full((4, columns), np.nan)
    for name, module in stand_ins().items():
        monkeypatch.setattr(registers, name, module)
    low, high = -3, columns - 5
    edges = (
        types.SimpleNamespace(registers=types.SimpleNamespace(flat=[np.full((128, 1), edge)])) for edge in (low, high)
    )
    registers.sums_of_warps(None, out, in_registers(matrix), *edges)
    np.testing.assert_allclose(out[:, :high], matrix.reshape(4, 16, columns).sum(axis=1)[:, :high], rtol=1e-12)
    assert np.isnan(out[:, high:]).all()
