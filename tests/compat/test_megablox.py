"""Megablox's contract, requirement by requirement (S2: jax's megablox, S4: MaxText's); the names say which."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import raster
from jax.experimental.pallas.ops.tpu.megablox import gmm as peers_gmm_with_vjp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm as peers_gmm
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata as peers_metadata
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm as peers_tgmm
from jax.extend.core import jaxprs_in_params

import trencadis as tr
from trencadis.compat.megablox import gmm, make_group_metadata, tgmm

M, K, N = 40, 12, 8
SIZES = [7, 0, 21, 12]  # every row has an owner
SHORT = [7, 0, 15, 3]  # 15 rows at the end have none


@pytest.fixture
def data(rng):
    shapes = {"x": (M, K), "w": (4, K, N), "y": (M, N), "old": (M, N), "old_w": (4, K, N)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def sizes_of(sizes, dtype=jnp.int32):
    return jnp.array(sizes, dtype)


def products(f, *args):
    """The grouped products in the jaxpr of f, as (problem, tiling) pairs."""
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "grouped_matmul":
                found.append((eqn.params["problem"], eqn.params["overrides"].tilings.forward))
            for inner in jaxprs_in_params(eqn.params):
                look(inner)

    look(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def gradients(f, *args):
    """The value, a fixed cotangent, and the gradients for it."""
    out, pull = jax.vjp(f, *args)
    ct = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
    return out, ct, pull(ct)


# ---------------------------------------------------------------------------------------------------------------------
# Signatures


def test_s4_01_s4_07_names_order_and_defaults():
    """S4-01, S4-07: three functions with the peers' names, order and defaults."""
    for mine, theirs in ((gmm, peers_gmm), (tgmm, peers_tgmm), (make_group_metadata, peers_metadata)):
        mine, theirs = (inspect.signature(f).parameters.values() for f in (mine, theirs))
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


def test_s2_18_jit_with_static_arguments(data):
    """S2-18: jit with megablox's static argument names works on every supported jax, without Pallas."""
    static = ("preferred_element_type", "tiling", "transpose_rhs", "interpret")
    f = jax.jit(gmm, static_argnames=static)
    out = f(data["x"], data["w"], sizes_of(SHORT), preferred_element_type=jnp.float32, tiling=(16, 8, 8))
    oracle.check(out, oracle.rows(data["x"], data["w"], SHORT))
    g = jax.jit(tgmm, static_argnames=("preferred_element_type", "tiling", "num_actual_groups", "interpret"))
    oracle.check(
        g(data["x"].T, data["y"], sizes_of(SHORT), num_actual_groups=4), oracle.contraction(data["x"], data["y"], SHORT)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def refused(text, f, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        f(*args, **kwargs)
    assert str(error.value) == text


@pytest.mark.parametrize("shape", [(K,), (1, M, K)])
def test_s2_01_lhs_rank(data, shape):
    text = f"Expected 2-tensor for 'lhs' but got {len(shape)}-tensor."
    refused(text, gmm, jnp.ones(shape), data["w"], sizes_of(SIZES))
    refused(text, tgmm, jnp.ones(shape), data["y"], sizes_of(SIZES))


def test_s2_02_rhs_rank(data):
    refused("Expected 3-tensor for 'rhs' but got 2-tensor.", gmm, data["x"], data["w"][0], sizes_of(SIZES))
    refused("Expected 2-tensor for 'rhs' but got 3-tensor.", tgmm, data["x"].T, data["w"], sizes_of(SIZES))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_s2_03_any_integer_group_sizes(data, dtype):
    out = gmm(data["x"], data["w"], sizes_of(SHORT, dtype))
    oracle.check(out, oracle.rows(data["x"], data["w"], SHORT))


def test_s2_03_group_sizes_of_another_kind(data):
    text = "Expected 32-bit integer 'group_sizes' but got float32."
    refused(text, gmm, data["x"], data["w"], jnp.array(SIZES, jnp.float32))
    refused(text, tgmm, data["x"].T, data["y"], jnp.array(SIZES, jnp.float32))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_s2_04_s4_03_other_floats(data, dtype):
    """S2-04, S4-03: no restriction to bfloat16 and float32."""
    x, w = data["x"].astype(dtype), data["w"].astype(dtype)
    oracle.check(gmm(x, w, sizes_of(SHORT)), oracle.rows(x, w, SHORT))


def test_s4_03_integers_are_exact():
    """S4-03: int8 x int8 -> int32, values that float32 could not hold."""
    x, w = jnp.full((6, 3), 127, jnp.int8), jnp.full((2, 3, 2), -128, jnp.int8)
    out = gmm(x, w, sizes_of([2, 3]), jnp.int32)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, oracle.rows(x, w, [2, 3]))
    big = jnp.full((6, 3), 2**20 + 1, jnp.int32)
    np.testing.assert_array_equal(gmm(big, jnp.full_like(w, 11, jnp.int32), sizes_of([6, 0]), jnp.int32)[0, 0],
                                  3 * 11 * (2**20 + 1))  # fmt: skip


@pytest.mark.parametrize("tm", [16, 128, 1000])
def test_s2_05_m_need_not_be_divisible(data, tm):
    out = gmm(data["x"], data["w"], sizes_of(SHORT), tiling=(tm, 128, 128))
    oracle.check(out, oracle.rows(data["x"], data["w"], SHORT))


def test_s2_06_existing_out_dtype(data):
    text = "Existing output dtype must match preferred_element_type."
    old = data["old"].astype(jnp.bfloat16)
    refused(text, gmm, data["x"], data["w"], sizes_of(SIZES), existing_out=old)
    refused(text, tgmm, data["x"].T, data["y"], sizes_of(SIZES), existing_out=data["old_w"].astype(jnp.bfloat16))


def test_s2_06_existing_out_shape(data):
    with pytest.raises(ValueError, match=r"existing_out: want shape \(40, 8\)"):
        gmm(data["x"], data["w"], sizes_of(SIZES), existing_out=data["old"][:-1])
    with pytest.raises(ValueError, match=r"existing_out: want shape \(4, 12, 8\)"):
        tgmm(data["x"].T, data["y"], sizes_of(SIZES), existing_out=data["old_w"][:-1])
    with pytest.raises(TypeError, match="existing_out: want an array; got list"):
        gmm(data["x"], data["w"], sizes_of(SIZES), existing_out=[0.0])


@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,)])
def test_s2_07_group_offset_shape(data, shape):
    text = f"group_offset must be a ()-shaped array. Got: {shape}."
    offset = jnp.zeros(shape, jnp.int32)
    refused(text, gmm, data["x"], data["w"], sizes_of(SIZES), group_offset=offset)
    refused(text, tgmm, data["x"].T, data["y"], sizes_of(SIZES), group_offset=offset)


@pytest.mark.parametrize("offset", [1, np.int64(1), jnp.array(1), jnp.array([1])])
def test_s2_07_s2_14_group_offset_forms(data, offset):
    """S2-07, S2-14: an int, () or (1,); rhs[i] belongs to group offset + i, and other groups' rows are 0."""
    x, w = data["x"].at[:7].set(jnp.nan).at[22:].set(jnp.nan), data["w"][1:3]
    out = gmm(x, w, sizes_of(SHORT), group_offset=offset)
    oracle.check(out, oracle.rows(data["x"], w, SHORT, first=1))
    assert not out[:7].any() and not out[22:].any()
    out = tgmm(x.T, data["y"], sizes_of(SHORT), group_offset=offset, num_actual_groups=2)
    oracle.check(out, oracle.contraction(data["x"], data["y"], SHORT, first=1, local=2))


@pytest.mark.parametrize("tiling", [None, lambda m, k, n: None])
def test_s2_08_no_tiling_found(data, tiling):
    text = f"No tuned tiling found for (m, k, n) = ({M}, {K}, {N})"
    refused(text, gmm, data["x"], data["w"], sizes_of(SIZES), tiling=tiling)
    refused(text, gmm, data["x"], data["w"].mT, sizes_of(SIZES), tiling=tiling, transpose_rhs=True)
    refused(text, tgmm, data["x"].T, data["y"], sizes_of(SIZES), tiling=tiling)


def test_s2_09_shapes_that_do_not_match(data):
    """S2-09, defect 7.4: these raise, where the original reads out of bounds."""
    x, w, y = data["x"], data["w"], data["y"]
    with pytest.raises(ValueError, match=r"rhs: the second dimension must be k = 11"):
        gmm(x[:, 1:], w, sizes_of(SIZES))
    with pytest.raises(ValueError, match=r"rhs: the last dimension must be k = 12"):
        gmm(x, w, sizes_of(SIZES), transpose_rhs=True)
    with pytest.raises(ValueError, match=r"rhs: holds 4 groups but group_sizes names only 3"):
        gmm(x, w, sizes_of(SIZES[1:]))
    with pytest.raises(ValueError, match=r"lhs: the last dimension must be m = 39"):
        tgmm(x.T, y[1:], sizes_of(SIZES))
    with pytest.raises(ValueError, match=r"group_offset: the window \[2, 6\)"):
        gmm(x, w, sizes_of(SIZES), group_offset=2)
    refused("Expected 1-tensor for 'group_sizes' but got 2-tensor.", tgmm, x.T, y, sizes_of(SIZES)[None])
    with pytest.raises(ValueError, match="must sum to at most m = 40"):  # numpy: known inside jit too
        jax.jit(lambda x, y: tgmm(x.T, y, np.array([30, 30]), group_offset=0))(x, y)


# ---------------------------------------------------------------------------------------------------------------------
# Meaning


def test_the_peer_itself_agrees(data):
    """Where megablox is defined, this is megablox: result and gradients of its own kernels, interpreted."""

    def call(f, x, w, **kwargs):
        offset, old = jnp.int32(1), jnp.array(data["old"])
        return f(x, w, sizes_of([8, 5, 27]), tiling=(8, 8, 8), group_offset=offset, existing_out=old, **kwargs)

    mine = gradients(functools.partial(call, gmm), data["x"], data["w"][:2])
    theirs = gradients(functools.partial(call, peers_gmm_with_vjp, interpret=True), data["x"], data["w"][:2])
    oracle.check(mine[0][8:], oracle.wide(theirs[0])[8:])  # it leaves the tile of group 0 undefined
    for a, b in zip(mine[2], theirs[2], strict=True):
        oracle.check(a, oracle.wide(b))


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_s2_11_s2_12_values_for_any_tile(data, transpose_rhs):
    """S2-11, S2-12: k that no tile divides, tiles that groups share; NaN stays in the rows of its group."""
    x, w = data["x"].at[7].set(jnp.nan).at[25:].set(jnp.inf), data["w"].at[3].set(jnp.nan)
    rhs = w.mT if transpose_rhs else w
    out = gmm(x, rhs, sizes_of(SHORT), tiling=(16, 8, 8), transpose_rhs=transpose_rhs)
    want = oracle.rows(x, w, SHORT)
    assert np.isnan(out[7]).all() and np.isnan(out[22:25]).all()
    clean = np.r_[0:7, 8:22, 25:M]
    oracle.check(out[clean], want[clean])
    assert not out[25:].any()


def test_s2_13_s0_16_existing_out_is_overwritten(data):
    """S2-13: owned rows are computed, the others are those of existing_out; NaN in overwritten rows does not count."""
    old = data["old"].at[:25].set(jnp.nan)  # these rows are overwritten: what they held must not matter
    out = gmm(data["x"], data["w"], sizes_of(SHORT), existing_out=old)
    want = oracle.rows(data["x"], data["w"], SHORT)
    oracle.check(out[:25], want[:25])
    np.testing.assert_array_equal(out[25:], old[25:])


def test_s0_22_gradient_of_an_overwritten_existing_out(data):
    """Defects 7.3 and 7.10: the cotangent is 0 where the rows were overwritten, the incoming one elsewhere."""

    def f(x, w, old):
        return gmm(x, w, sizes_of(SHORT), existing_out=old)

    _, ct, (dx, dw, d_old) = gradients(f, data["x"], data["w"], data["old"])
    np.testing.assert_array_equal(d_old[25:], ct[25:])
    assert not d_old[:25].any()
    oracle.check(dx, oracle.rows(ct, data["w"], SHORT, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(data["x"], ct, SHORT))


def test_s2_15_mixed_operands(data):
    """S2-15: bfloat16 with float32; the product is not rounded to bfloat16."""
    x, w = data["x"].astype(jnp.bfloat16), data["w"]
    out = gmm(x, w, sizes_of(SHORT))
    assert out.dtype == jnp.float32
    oracle.check(out, oracle.rows(x, w, SHORT), dtype="float32")


@pytest.mark.parametrize("sizes", [SHORT, [0, 0, 0, 0], [0, 3, 0, 0]])
def test_s2_17_unowned_rows_are_zero(data, sizes):
    """S2-17, defect 7.2: also in the gradient of lhs, whatever these rows hold, and if all groups are empty."""
    end = sum(sizes)
    x = data["x"].at[end:].set(jnp.nan)
    f = jax.jit(functools.partial(jax.vjp, gmm))
    out, pull = f(x, data["w"], sizes_of(sizes))
    ct = data["y"].at[end:].set(jnp.nan)
    dx, dw, _ = pull(ct)
    oracle.check(out, oracle.rows(x, data["w"], sizes))
    oracle.check(dx, oracle.rows(ct, data["w"], sizes, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, ct, sizes))
    assert not out[end:].any() and not dx[end:].any()


@pytest.mark.parametrize("offset", [None, 0, 2])
def test_s1_11_tgmm_computes_as_many_groups_as_there_are_sizes(data, offset):
    """As in the original; the matrices of groups past the last are 0."""
    out = tgmm(data["x"].T, data["y"], sizes_of(SHORT), group_offset=offset)
    assert out.shape == (4, K, N)
    first = offset or 0
    oracle.check(out[: 4 - first], oracle.contraction(data["x"], data["y"], SHORT, first=first))
    assert not out[4 - first :].any()


def test_tgmm_with_a_traced_offset_and_nan_around(data):
    x, y = data["x"].at[:7].set(jnp.nan).at[25:].set(jnp.nan), data["y"].at[:7].set(jnp.inf)
    f = jax.jit(functools.partial(tgmm, num_actual_groups=2))
    out = f(x.T, y, sizes_of(SHORT), group_offset=jnp.array(2))
    oracle.check(out, oracle.contraction(data["x"], data["y"], SHORT, first=2))


def test_tgmm_accumulates_and_has_derivatives(data):
    """Defect 7.3: the product is added to existing_out, and its gradient is the incoming cotangent."""
    x, y, old = data["x"], data["y"], data["old_w"]
    out, ct, (dx, dy, d_old) = gradients(lambda x, y, old: tgmm(x.T, y, sizes_of(SHORT), existing_out=old), x, y, old)
    oracle.check(out, oracle.contraction(x, y, SHORT, existing_out=old))
    np.testing.assert_array_equal(d_old, ct)
    oracle.check(dx, oracle.rows(y, ct, SHORT, transpose_rhs=True))
    oracle.check(dy, oracle.rows(x, ct, SHORT))


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def walk_of(make=make_group_metadata):
    return jax.jit(make, static_argnames=("m", "tm", "num_nonzero_groups", "visit_empty_groups"))


@pytest.mark.parametrize("empty", [False, True])
def test_metadata_is_the_peers(empty):
    """The visits and their number are those of the original wherever it is right."""
    mine, theirs = walk_of(), walk_of(peers_metadata)
    for sizes in ([7, 0, 21, 0, 12], [16, 8, 16, 0, 0], [0, 0, 40, 0, 0], [1, 1, 1, 1, 36]):
        for start in range(3):
            args = {"group_sizes": sizes_of(sizes), "m": M, "tm": 8, "num_nonzero_groups": 3}
            args |= {"start_group": jnp.array(start), "visit_empty_groups": empty}
            (meta, n), (peers_meta, peers_n) = mine(**args), theirs(**args)
            assert n == peers_n
            np.testing.assert_array_equal(meta[0], peers_meta[0])
            for a, b in zip(meta[1:], peers_meta[1:], strict=True):
                assert (a.shape, a.dtype) == (b.shape, jnp.int32)
                np.testing.assert_array_equal(np.asarray(a)[:n], np.asarray(b)[:n])


@pytest.mark.parametrize("sizes", [SIZES, [8, 8, 16, 8], [10, 10, 10, 10], [39, 0, 0, 1]])
def test_s2_10_s2_19_bounds_of_the_walk(sizes):
    """S2-10, S2-19: tiles <= visits <= tiles + groups - 1, a run-time number; later entries repeat the last visit."""
    meta, n = walk_of()(
        group_sizes=sizes_of(sizes), m=M, tm=8, start_group=0, num_nonzero_groups=4, visit_empty_groups=False
    )
    groups, tiles = (np.asarray(ids).tolist() for ids in (meta.group_ids, meta.m_tile_ids))
    pairs = list(zip(groups, tiles, strict=True))
    assert 5 <= n <= 8 == len(pairs)
    assert pairs[:n] == raster.walk(sizes, M, 8)
    assert set(pairs[n:]) <= {pairs[n - 1]}


def test_s2_14_group_ids_are_those_of_all_groups():
    meta, n = walk_of()(
        group_sizes=sizes_of(SIZES), m=M, tm=8, start_group=2, num_nonzero_groups=2, visit_empty_groups=False
    )
    assert np.asarray(meta.group_ids)[:n].tolist() == [2, 2, 2, 2, 3, 3]
    assert np.asarray(meta.m_tile_ids)[:n].tolist() == [0, 1, 2, 3, 3, 4]


def test_s2_20_metadata_has_names_and_no_gradient_transposes(data):
    """S2-20: a named tuple, and d rhs of a transposed rhs is computed transposed, without a transpose operation."""
    meta, _ = walk_of()(group_sizes=sizes_of(SIZES), m=M, tm=8, start_group=0, num_nonzero_groups=4)
    offsets, group_ids, tile_ids = meta
    assert offsets is meta.group_offsets and group_ids is meta.group_ids and tile_ids is meta.m_tile_ids
    f = jax.grad(lambda x, w: gmm(x, w, sizes_of(SIZES), transpose_rhs=True).sum(), argnums=(0, 1))
    assert "transpose[" not in str(jax.make_jaxpr(f)(data["x"], data["w"].mT))


# ---------------------------------------------------------------------------------------------------------------------
# Shards


@pytest.mark.parametrize("transpose_rhs, shards", [(False, 4), (True, 2)])
def test_s2_21_shards_chained_by_existing_out(data, transpose_rhs, shards):
    """S2-21: shard by shard into one result; gradients of lhs are summed, those of rhs concatenated."""
    x, w, ct = data["x"], data["w"].mT if transpose_rhs else data["w"], data["y"]
    per = 4 // shards
    f = jax.jit(functools.partial(gmm, transpose_rhs=transpose_rhs))
    out, dx, dw = None, 0.0, []
    for first in range(0, 4, per):
        offset, old = jnp.array(first), out

        def shard(x, w, offset=offset, old=old):
            return f(x, w, sizes_of(SHORT), group_offset=offset, existing_out=old)

        out, pull = jax.vjp(shard, x, w[first : first + per])
        dx_i, dw_i = pull(ct)
        dx, dw = dx + dx_i, [*dw, dw_i]
    oracle.check(out, oracle.rows(x, data["w"], SHORT))
    oracle.check(dx, oracle.rows(ct, data["w"], SHORT, transpose_rhs=True))
    want = oracle.contraction(x, ct, SHORT)
    oracle.check(jnp.concatenate(dw), want.swapaxes(1, 2) if transpose_rhs else want)


# ---------------------------------------------------------------------------------------------------------------------
# MaxText


NINE = (8, 4, 2, 16, 6, 3, 24, 12, 5)


def passes(data, tiling, **kwargs):
    """The tiles of forward, d lhs and d rhs, each in the units of its own call."""
    f = jax.grad(lambda x, w: gmm(x, w, sizes_of(SIZES), tiling=tiling, **kwargs).sum(), argnums=(0, 1))
    by_out = {}
    for problem, tile in products(f, data["x"], data["w"]):
        by_out[problem.out_shape] = tile and (tile.m, tile.k, tile.n)
    return by_out[(M, N)], by_out[(M, K)], by_out[(4, K, N)]


def test_s4_09_nine_numbers_are_three_tiles(data):
    """S4-09: each pass gets its own three sizes, in the order of its own call, as in MaxText."""
    assert passes(data, NINE) == (NINE[:3], NINE[3:6], NINE[6:])


def test_s4_09_three_numbers_stay_with_their_dimensions(data):
    """S4-09, S0-23: MaxText's backward pass fails with three numbers; in d lhs the tile size of k stays with k."""
    assert passes(data, (8, 4, 2)) == ((8, 4, 2), (8, 2, 4), (8, 4, 2))


def test_a_function_is_asked_for_each_pass_in_the_units_of_its_call(data):
    table = {(M, K, N): (8, 4, 2), (M, N, K): (16, 6, 3)}
    assert passes(data, lambda m, k, n: table[m, k, n]) == ((8, 4, 2), (16, 6, 3), (8, 4, 2))


@pytest.mark.parametrize("tiling", [(128,) * 3, (128,) * 9])
def test_the_peers_default_is_planned(data, tiling):
    assert passes(data, tiling) == (None, None, None)
    assert passes(data, tr.Tiling(128, 128, 128))[0] == (128, 128, 128)


def test_s4_09_gradients_with_nine_numbers_and_no_interpret(data):
    x, w = data["x"], data["w"]
    _, ct, (dx, dw) = gradients(lambda x, w: gmm(x, w, sizes_of(SHORT), tiling=NINE, interpret=None), x, w)
    oracle.check(dx, oracle.rows(ct, w, SHORT, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, ct, SHORT))


@pytest.mark.parametrize("tiling", [(8, 8), (8, 8, 0), (1, 2, 3, 4, 5, 6), "auto"])
def test_a_tiling_that_is_not_valid(data, tiling):
    with pytest.raises(ValueError, match="tiling"):
        gmm(data["x"], data["w"], sizes_of(SIZES), tiling=tiling)
    with pytest.raises(ValueError, match="tiling"):
        tgmm(data["x"].T, data["y"], sizes_of(SIZES), tiling=NINE)


def test_interpret_and_second_order(data):
    """interpret=True gives the same numbers; second derivatives exist, which no peer has."""
    x, w = data["x"], data["w"]
    np.testing.assert_allclose(gmm(x, w, sizes_of(SHORT), interpret=True), gmm(x, w, sizes_of(SHORT)), atol=1e-5)
    f = jax.grad(lambda x, w: (gmm(x, w, sizes_of(SHORT)) ** 2).sum())
    hvp = jax.jvp(lambda x: f(x, w), (x,), (x,))[1]
    want = 2 * oracle.rows(oracle.rows(x, w, SHORT), w, SHORT, transpose_rhs=True)
    oracle.check(hvp, want)
