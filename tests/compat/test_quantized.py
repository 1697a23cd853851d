"""Quantized operands in the drop-in modules: MaxText's contract (S4), with stand-ins for `qwix.QArray`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from oracle import close
from stand_in import SIZES, K, M, N, QArray, meaning, qarray

import trencadis as tr
from trencadis.compat import ejkernel
from trencadis.compat.megablox import gmm, tgmm
from trencadis.core.cost import cost
from trencadis.quant import quantize

pytestmark = pytest.mark.core


def transposed(q):
    return jax.tree.map(lambda leaf: leaf.swapaxes(-1, -2), q)


def test_s4_02_s4_07_gmm(x, w, rng):
    """S4-02, S4-07: either or both operands; windows, transposed weights, overwritten rows, tiles of any size."""
    q, r, old = qarray(x, "int8", (1, 0)), qarray(w, "int8", (0, 0, 1)), rng.normal(size=(M, N)).astype(np.float32)
    x[16:] = np.nan
    for a, b in ((q, r), (x, r), (q, w)):
        out = jax.jit(functools.partial(gmm, tiling=(8, 8, 8)))(a, b, SIZES, existing_out=old)
        close(out[:16], oracle.rows(meaning(a)[:16], meaning(b), SIZES))
        np.testing.assert_array_equal(out[16:], old[16:])
    window = transposed(QArray(r.qvalue[2:], r.scale))
    f = jax.jit(functools.partial(gmm, transpose_rhs=True, tiling=lambda m, k, n: (m, k, n)))
    close(f(q, window, SIZES, group_offset=jnp.array([2])), oracle.rows(meaning(q), meaning(r)[2:], SIZES, first=2))


def test_s4_02_s4_06_s4_07_tgmm(x, y, rng):
    """S4-02, S4-06, S4-07, defect 7.10: existing_out is accumulated with scales too; groups past the last are 0."""
    q, r = qarray(x, "int8", (0, 1)), qarray(y, "int8", (1, 0))
    old = rng.normal(size=(4, K, N)).astype(np.float32)
    for a, b in ((q, r), (x, r), (q, y)):
        left = transposed(a) if isinstance(a, QArray) else a.T
        out, pull = jax.vjp(jax.jit(lambda old, left=left, b=b: tgmm(left, b, SIZES, existing_out=old)), old)
        close(out, oracle.contraction(meaning(a), meaning(b), SIZES) + old)
        np.testing.assert_array_equal(pull(old)[0], old)
    out = jax.jit(lambda q, r: tgmm(transposed(q), r, SIZES, group_offset=2, num_actual_groups=3))(q, r)
    close(out[:2], oracle.contraction(meaning(q), meaning(r), SIZES, first=2))
    assert not out[2].any()


@pytest.mark.parametrize("format", ["int4", "float8_e5m2"])
def test_s4_03_narrow_values_without_scales(format, x, w):
    """S4-03: the values without scales are a valid operand."""
    x, w = qarray(x, format, (1, 0)).qvalue, qarray(w, format, (1, 0, 1)).qvalue
    close(jax.jit(gmm)(x, w, SIZES), oracle.rows(meaning(x), meaning(w), SIZES))


def test_s4_04_tiles_past_k_and_blocks_of_scales(x, w):
    """S4-04: tiles that do not divide k or match the blocks of scales do not change which scale an entry has."""
    q, r = qarray(x, "float8_e4m3fn", (1, 4)), qarray(w, "float8_e4m3fn", (1, 4, 8))
    f, want = jax.jit(functools.partial(gmm, tiling=(8, 8, 8))), oracle.rows(meaning(q), meaning(r), SIZES)
    close(f(q, r, SIZES), want)
    bad = QArray(r.qvalue, r.scale.at[0, -1].set(jnp.inf), None, r.qtype)  # the last tile of k, of the first group
    out = np.asarray(f(q, bad, SIZES))
    assert not np.isfinite(out[:7]).any()
    close(out[7:], want[7:])


def test_s4_05_bytes_are_those_of_all_leaves():
    """S4-05: packed values and scales count, for the owned rows and the nonempty groups."""
    x, w = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((4, 32, 16), jnp.float32)
    for format, bits in (("int8", 8), ("int4", 4)):
        q = jax.eval_shape(lambda w, format=format: quantize(w, format, (1, 16, 1)), w)
        for rhs in (q, QArray(q.values, q.scale)):
            found = tr.why(x, rhs, np.array([16, 0, 16, 0]), jnp.bfloat16)
            group = 32 * 16 * bits // 8 + 4 * 2 * 16
            assert found.cost == cost(found.problem, [16, 0, 16, 0], (64 * 32 * 2, 4 * group))
            assert found.cost.flops == 2 * 32 * 32 * 16  # all of k, although the product is split where scales change
            assert found.cost.bytes == 32 * 32 * 2 + 2 * group + 32 * 16 * 2
            assert found.passes[2].reason == "rhs is quantized, and a constant"


@pytest.mark.parametrize("tile", [(1, 0, 1), (1, 4, 4)])
def test_s4_08_shards_of_quantized_weights(tile, x, w):
    """S4-08: experts over a mesh with check_vma on; values and scales are sharded alike; d lhs is right."""
    r = qarray(w, "int8", tile)
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("e"), P()), out_specs=P())
    def sharded(x, r, sizes):
        first = jax.lax.axis_index("e") * r.qvalue.shape[0]
        return jax.lax.psum(gmm(x, r, sizes, group_offset=first), "e")

    out, pull = jax.vjp(jax.jit(lambda x: sharded(x, r, SIZES)), x)
    close(out, oracle.rows(x, meaning(r), SIZES))
    close(pull(out)[0], oracle.rows(out, meaning(r), SIZES, transpose_rhs=True))


@pytest.mark.parametrize("tiling", [(8, 4, 2), (8, 4, 2, 16, 6, 3, 24, 12, 5)])
def test_s4_09_three_tiles_or_nine(tiling, x, w):
    """S4-09: forward and d lhs with three or nine tile sizes."""
    r = qarray(w, "int8", (1, 0, 1))
    out, pull = jax.vjp(jax.jit(lambda x: gmm(x, r, SIZES, tiling=tiling)), x)
    close(out, oracle.rows(x, meaning(r), SIZES))
    close(pull(out)[0], oracle.rows(out, meaning(r), SIZES, transpose_rhs=True))


def test_ejkernel_takes_quantized_operands(x, w, y):
    q, r, s = qarray(x, "int8", (1, 0)), qarray(w, "int8", (1, 0, 1)), qarray(y, "int8", (1, 0))
    close(jax.jit(ejkernel.grouped_matmul)(q, r, SIZES), oracle.rows(meaning(q), meaning(r), SIZES))
    got = jax.jit(ejkernel.transposed_grouped_matmul)(x.T, s, SIZES)
    close(got, oracle.contraction(x, meaning(s), SIZES))
    with pytest.raises(TypeError, match="lhs: want a floating point dtype; got int8"):
        ejkernel.grouped_matmul(q.qvalue, w, SIZES)
