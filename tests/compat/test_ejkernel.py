"""ejkernel's contract, requirement by requirement (S0: its interface, S1: its kernels' documentation)."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import raster

import trencadis as tr
from trencadis.backends import BACKENDS
from trencadis.compat import ejkernel, megablox
from trencadis.compat.ejkernel import grouped_matmul, make_group_metadata, transposed_grouped_matmul
from trencadis.core.arguments import problem_of
from trencadis.core.cost import cost
from trencadis.core.problem import Form

M, K, N = 37, 12, 7
SIZES = [9, 0, 18, 10]  # every row has an owner
SHORT = [9, 0, 13, 3]  # 12 rows at the end have none


@pytest.fixture
def data(rng):
    shapes = {"x": (M, K), "w": (4, K, N), "y": (M, N), "old": (M, N), "old_w": (4, K, N)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def sizes_of(sizes):
    return jnp.array(sizes, jnp.int32)


def products(f, *args):
    """The grouped products in the jaxpr of f: [(problem, overrides)], in order."""
    eqns = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return [(e.params["problem"], e.params["overrides"]) for e in eqns if e.primitive.name == "grouped_matmul"]


def with_gradients(f, *args):
    """The value, a fixed cotangent and its pullback."""
    out, pull = jax.vjp(f, *args)
    ct = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
    return out, ct, pull(ct)


def defaults(f):
    return {p.name: (p.default, p.kind) for p in inspect.signature(f).parameters.values()}


# ---------------------------------------------------------------------------------------------------------------------
# S0: the interface


def test_s0_01_signature(data):
    """S0-01: names, order, defaults; all usable by position and by keyword."""
    either, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    want = {"lhs": none, "rhs": none, "group_sizes": none, "preferred_element_type": jnp.float32}
    want |= {"tiling": (128, 128, 128), "group_offset": None, "existing_out": None, "transpose_rhs": False}
    want |= {"interpret": False, "precision": jax.lax.Precision.DEFAULT}
    assert list(defaults(grouped_matmul).items()) == [(name, (default, either)) for name, default in want.items()]
    x, w, old = data["x"], data["w"].mT, data["old"]
    rest = (jnp.float32, (16, 8, 8), jnp.array(0), old, True, False, "highest")
    by_position = grouped_matmul(x, w, sizes_of(SHORT), *rest)
    by_name = grouped_matmul(**dict(zip(want, (x, w, sizes_of(SHORT), *rest), strict=True)))
    np.testing.assert_array_equal(by_position, by_name)
    oracle.check(by_name, oracle.rows(x, w, SHORT, transpose_rhs=True, existing_out=old))


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_s0_02_s0_11_s0_12_values(data, transpose_rhs):
    """S0-02, S0-11, S0-12: both layouts of rhs; groups and k that no tile divides; an empty group."""
    x, w = data["x"], data["w"].mT if transpose_rhs else data["w"]
    out = grouped_matmul(x, w, sizes_of(SIZES), tiling=(16, 8, 4), transpose_rhs=transpose_rhs)
    oracle.check(out, oracle.rows(x, data["w"], SIZES))


@pytest.mark.parametrize("offset", [2, jnp.array(2), jnp.array([2])])
def test_s0_03_s0_04_s0_15_a_shard_of_the_groups(data, offset):
    """S0-03, S0-04, S0-15: more sizes than matrices; the rows of groups held elsewhere are 0, whatever they hold."""
    x = data["x"].at[:9].set(jnp.nan).at[22:].set(jnp.nan)
    out = grouped_matmul(x, data["w"][2:3], sizes_of(SHORT), group_offset=offset)
    oracle.check(out, oracle.rows(data["x"], data["w"][2:3], SHORT, first=2))
    assert not out[:9].any() and not out[22:].any()


def test_s0_04_the_offset_may_be_traced(data):
    f = jax.jit(lambda offset: grouped_matmul(data["x"], data["w"][:2], sizes_of(SHORT), group_offset=offset))
    for first in range(3):
        oracle.check(f(jnp.array([first])), oracle.rows(data["x"], data["w"][:2], SHORT, first=first))


def test_s0_05_s0_10_what_does_not_fit_is_refused(data):
    """S0-05, S0-10: shapes and dtypes are checked, and the error names the argument."""
    x, w, s = data["x"], data["w"], sizes_of(SIZES)
    with pytest.raises(ValueError, match=r"existing_out: want dtype float32"):
        grouped_matmul(x, w, s, existing_out=data["old"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"existing_out: want shape \(37, 7\)"):
        grouped_matmul(x, w, s, existing_out=data["old"].T)
    with pytest.raises(ValueError, match=r"rhs: the second dimension must be k = 11"):
        grouped_matmul(x[:, 1:], w, s)
    with pytest.raises(TypeError, match=r"lhs: want a floating point dtype; got int32"):
        grouped_matmul(x.astype(jnp.int32), w, s)
    with pytest.raises(TypeError, match=r"rhs: want a floating point dtype; got int8"):
        transposed_grouped_matmul(x.T, data["y"].astype(jnp.int8), s)
    with pytest.raises(TypeError, match=r"group_sizes: want an integer dtype; got float32"):
        grouped_matmul(x, w, s.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"lhs: want 2 dimensions"):
        grouped_matmul(x[None], w, s)


@pytest.mark.parametrize("tiling, tile", [
    ((128, 128, 128), None), (None, None), (lambda m, k, n: None, None), ((16, 8, 4), (16, 8, 4)),
    (lambda m, k, n: (m, k, n), (M, K, N)), (tr.Tiling(128, 128, 128), (128, 128, 128)),
])  # fmt: skip
def test_s0_06_tilings(data, tiling, tile):
    """S0-06: a tuple, a function, or None; None and the default of 128 are planned."""
    f = functools.partial(grouped_matmul, tiling=tiling)
    ((_, overrides),) = products(f, data["x"], data["w"], sizes_of(SIZES))
    assert overrides.tilings.forward == (tile and tr.Tiling(*tile))


def test_s0_07_sums_are_float32():
    """S0-07: 257 ones in bfloat16 sum to 257, which bfloat16 cannot count to; the output dtype is what was asked."""
    x, w = jnp.ones((3, 257), jnp.bfloat16), jnp.ones((1, 257, 2), jnp.bfloat16)
    out = grouped_matmul(x, w, sizes_of([2]))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [[257, 257], [257, 257], [0, 0]])
    assert grouped_matmul(x, w, sizes_of([2]), jnp.bfloat16).dtype == jnp.bfloat16


def test_s0_08_precision_is_honoured(data):
    """S0-08: precision reaches every product, also those of gradients, and the compiler; a wrong value raises."""

    def f(x, w):
        return grouped_matmul(x, w, sizes_of(SIZES), precision=jax.lax.Precision.HIGHEST).sum()

    found = products(jax.grad(f, argnums=(0, 1)), data["x"], data["w"])
    assert len(found) == 3
    assert all(problem.precision == jax.lax.Precision.HIGHEST for problem, _ in found)
    assert "HIGHEST" in jax.jit(f).lower(data["x"], data["w"]).as_text()
    with pytest.raises(ValueError, match="precision: want"):
        grouped_matmul(data["x"], data["w"], sizes_of(SIZES), precision="very good")


def test_s0_09_there_is_a_registry(data):
    """S0-09: every backend is an entry of one dict; an unknown name gets the list of them."""
    for name, backend in BACKENDS.items():
        assert callable(backend.plan) and callable(backend.run), name
    with pytest.raises(ValueError, match=", ".join(map(repr, BACKENDS))):
        tr.grouped_matmul(data["x"], data["w"], sizes_of(SIZES), backend="cutlass")


def test_s0_13_the_documented_example():
    """S0-13, defect 7.7: m = 300 with tiles of 128 rows, as written; the original raises."""
    key = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.normal(key[0], (300, 64))
    rhs = jax.random.normal(key[1], (3, 64, 32))
    group_sizes = jnp.array([100, 150, 50], dtype=jnp.int32)
    for tiling in ((128, 128, 128), tr.Tiling(128, 128, 128)):
        result = grouped_matmul(lhs, rhs, group_sizes, tiling=tiling)
        assert result.shape == (300, 32)
        oracle.check(result, oracle.rows(lhs, rhs, [100, 150, 50]))


def test_s0_14_sizes_that_do_not_sum_to_m(data):
    """S0-14: fewer rows: the rest is 0. More, or negative: an error if known, clamped if traced."""
    x, w = data["x"].at[25:].set(jnp.nan), data["w"]
    oracle.check(grouped_matmul(x, w, sizes_of(SHORT)), oracle.rows(data["x"], w, SHORT))
    with pytest.raises(ValueError, match="group_sizes: must sum to at most m = 37 rows; got a sum of 40"):
        grouped_matmul(x, w, sizes_of([10, 10, 10, 10]))
    with pytest.raises(ValueError, match="group_sizes: sizes must be >= 0; group 2 has -3"):
        grouped_matmul(x, w, sizes_of([10, 10, -3, 10]))
    f = jax.jit(grouped_matmul)
    for sizes in ([10, 10, 10, 10], [10, 10, -3, 10]):
        oracle.check(f(data["x"], w, sizes_of(sizes)), oracle.rows(data["x"], w, sizes))


def test_s0_16_s0_22_existing_out_by_both_meanings(data):
    """S0-16, S0-22: existing_out is added to here and overwritten in megablox, each with the right gradient."""
    x, w, old = data["x"], data["w"], data["old"]
    out, ct, (dx, dw, d_old) = with_gradients(
        lambda x, w, old: grouped_matmul(x, w, sizes_of(SHORT), existing_out=old), x, w, old
    )
    oracle.check(out, oracle.rows(x, w, SHORT, existing_out=old))
    np.testing.assert_array_equal(d_old, ct)
    oracle.check(dx, oracle.rows(ct, w, SHORT, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, ct, SHORT))
    out, ct, (d_old,) = with_gradients(lambda old: megablox.gmm(x, w, sizes_of(SHORT), existing_out=old), old)
    oracle.check(out[:25], oracle.rows(x, w, SHORT)[:25])
    np.testing.assert_array_equal(out[25:], old[25:])
    np.testing.assert_array_equal(d_old, np.where(np.arange(M)[:, None] < 25, 0, ct))


@pytest.mark.parametrize("f", [grouped_matmul, megablox.gmm])
def test_s0_17_a_donated_existing_out_is_the_result(data, f):
    """S0-17: the compiled program writes into the buffer it was given."""
    g = jax.jit(lambda x, w, s, old: f(x, w, s, existing_out=old), donate_argnums=3)
    compiled = g.lower(data["x"], data["w"], sizes_of(SHORT), data["old"]).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == data["old"].nbytes


@pytest.mark.parametrize("asked", [problem_of((300, 64), (3, 64, 32)), problem_of((64, 300), (300, 32), groups=3)])
def test_s0_18_s2_16_cost(asked):
    """S0-18, S2-16: 2mkn when every row is owned; half of it if half of the rows are, unlike in the peers."""
    assert cost(asked).flops == cost(asked, [100, 150, 50]).flops == 2 * 300 * 64 * 32
    assert cost(asked, [100, 0, 50]).flops == 300 * 64 * 32
    assert cost(asked, [100, 0, 50]).bytes < cost(asked).bytes


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_s0_19_s0_20_s0_21_gradients(data, transpose_rhs):
    """S0-19..21: gradients of a shard by value, under jit, in the dtypes of the operands; sizes have none."""
    x, y = data["x"].astype(jnp.bfloat16), data["w"][1:3]
    w = y.mT if transpose_rhs else y

    @jax.jit
    def f(x, w, s, offset):
        return with_gradients(lambda *a: grouped_matmul(*a, group_offset=offset, transpose_rhs=transpose_rhs), x, w, s)

    _, ct, (dx, dw, d_sizes) = f(x, w, sizes_of(SHORT), jnp.array(1))
    assert (dx.dtype, dw.dtype, d_sizes.dtype) == (jnp.bfloat16, jnp.float32, jax.dtypes.float0)
    oracle.check(dx, oracle.rows(ct, y, SHORT, first=1, transpose_rhs=True))
    want = oracle.contraction(x, ct, SHORT, first=1, local=2)
    oracle.check(dw, want.swapaxes(1, 2) if transpose_rhs else want)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_s0_20_s0_21_s0_23_one_tile_per_pass(data, transpose_rhs):
    """S0-23: d lhs is the rows form with rhs transposed, d rhs a contraction; the tile size of k stays with k."""
    w = data["w"].mT if transpose_rhs else data["w"]

    def f(tiling):
        g = functools.partial(grouped_matmul, tiling=tiling, transpose_rhs=transpose_rhs)
        found = products(jax.grad(lambda *a: g(*a, sizes_of(SIZES)).sum(), argnums=(0, 1)), data["x"], w)
        tiles = {}
        for problem, overrides in found:
            key = "d_rhs" if problem.form is Form.CONTRACTION else "d_lhs" if problem.n == K else "forward"
            tiles[key] = overrides.tilings.forward
            assert problem.transpose_rhs == {"forward": transpose_rhs, "d_lhs": not transpose_rhs, "d_rhs": False}[key]
        return tiles

    swapped = (lambda m, k, n: tr.Tiling(m, n, k)) if transpose_rhs else tr.Tiling  # d rhs is [g, n, k] then
    assert f((16, 8, 4)) == {"forward": tr.Tiling(16, 8, 4), "d_lhs": tr.Tiling(16, 4, 8), "d_rhs": swapped(16, 8, 4)}
    each = tr.Tilings(forward=(16, 8, 4), d_lhs=(32, 6, 2), d_rhs=(24, 3, 5))
    assert f(each) == {"forward": tr.Tiling(16, 8, 4), "d_lhs": tr.Tiling(32, 2, 6), "d_rhs": swapped(24, 3, 5)}


def test_s0_24_gradients_of_rows_past_the_groups(data):
    """S0-24, defect 7.2: they are 0, although the rows and their cotangent are NaN."""
    x, ct = data["x"].at[25:].set(jnp.nan), data["y"].at[25:].set(jnp.nan)
    _, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_of(SHORT)), x, data["w"])
    dx, dw = pull(ct)
    assert not dx[25:].any()
    oracle.check(dx, oracle.rows(data["y"], data["w"], SHORT, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(data["x"], data["y"], SHORT))


def test_s0_25_interpret(data):
    """S0-25: interpret=True works eagerly, under jit and under grad, on a CPU."""
    x, w = data["x"], data["w"]
    f = functools.partial(grouped_matmul, interpret=True)
    want = oracle.rows(x, w, SHORT)
    oracle.check(f(x, w, sizes_of(SHORT)), want)
    out, ct, (dx, dw, _) = jax.jit(functools.partial(with_gradients, f))(x, w, sizes_of(SHORT))
    oracle.check(out, want)
    oracle.check(dx, oracle.rows(ct, w, SHORT, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, ct, SHORT))


# ---------------------------------------------------------------------------------------------------------------------
# S1: the schedule


def schedule(sizes, **kwargs):
    """The visits as pairs, and the metadata, under jit as in ejkernel, with the first group traced."""
    static = ("m", "tm", "num_nonzero_groups", "visit_empty_groups")
    kwargs = {"m": 300, "tm": 128, "start_group": 0, "num_nonzero_groups": len(sizes)} | kwargs
    meta, count = jax.jit(make_group_metadata, static_argnames=static)(group_sizes=sizes_of(sizes), **kwargs)
    groups, tiles = np.asarray(meta.group_ids)[:count], np.asarray(meta.m_tile_ids)[:count]
    return list(zip(groups.tolist(), tiles.tolist(), strict=True)), meta


def test_s1_02_signature_of_the_metadata():
    only, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    names = ("group_sizes", "m", "tm", "start_group", "num_nonzero_groups", "visit_empty_groups")
    want = [(name, (none, only)) for name in names[:-1]] + [(names[-1], (True, only))]
    assert list(defaults(make_group_metadata).items()) == want


def test_s1_03_s1_04_s1_07_s1_09_the_documented_schedule():
    """S1-03, S1-04, S1-07, S1-09: m = 300, tm = 128 as documented; a tile is visited once by each group it spans."""
    pairs, meta = schedule([100, 150, 50])
    assert pairs == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
    assert np.asarray(meta.group_offsets).tolist() == [0, 100, 250, 300]
    assert [(x.shape, x.dtype) for x in meta] == [((4,), jnp.int32), ((5,), jnp.int32), ((5,), jnp.int32)]
    tiles = [tile for _, tile in pairs]
    assert tiles == sorted(tiles)  # visits to a tile are neighbours


def test_s1_05_a_window_comes_first():
    pairs, _ = schedule([100, 150, 50], start_group=jnp.array(1), num_nonzero_groups=1)
    assert pairs == [(1, 0), (1, 1)]


@pytest.mark.parametrize("empty", [False, True])
def test_s1_06_empty_groups(empty):
    """S1-06: an empty group has one visit, or none if visit_empty_groups is False."""
    sizes = [0, 128, 0, 100, 0]
    pairs, _ = schedule(sizes, visit_empty_groups=empty)
    assert pairs == raster.walk(sizes, 300, 128, empty=empty)
    assert [g for g, _ in pairs] == ([0, 1, 2, 3, 4] if empty else [1, 3])


@pytest.mark.parametrize("tiles", [3010, 8192])
def test_s1_08_many_tiles(tiles):
    """S1-08, defect 7.1: groups that start in the middle of the last tile, where the peers' float histogram errs."""
    pairs, _ = schedule([128 * (tiles - 1) + 5, 100, 23], m=128 * tiles)
    assert pairs == [*((0, t) for t in range(tiles)), (1, tiles - 1), (2, tiles - 1)]


# ---------------------------------------------------------------------------------------------------------------------
# S1: the contraction


def test_s1_01_three_functions_under_jit(data):
    """S1-01: the three functions that ejkernel exports, under jit with its static arguments."""
    assert all(hasattr(ejkernel, f) for f in ("grouped_matmul", "make_group_metadata", "transposed_grouped_matmul"))
    static = ("preferred_element_type", "tiling", "num_actual_groups", "interpret")
    f = jax.jit(transposed_grouped_matmul, static_argnames=static)
    out = f(data["x"].T, data["y"], sizes_of(SHORT), preferred_element_type=jnp.float32, tiling=(16, 8, 4),
            group_offset=jnp.array(1), num_actual_groups=2)  # fmt: skip
    oracle.check(out, oracle.contraction(data["x"], data["y"], SHORT, first=1, local=2))


def test_s1_10_s1_17_the_documented_example():
    """S1-10, S1-17: (64, 300) x (300, 32), and the signature."""
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert list(defaults(transposed_grouped_matmul).items())[3:] == [
        ("preferred_element_type", (jnp.float32, either)), ("tiling", ((128, 128, 128), either)),
        ("group_offset", (None, either)), ("num_actual_groups", (None, either)), ("existing_out", (None, either)),
        ("interpret", (False, either)),
    ]  # fmt: skip
    key = jax.random.split(jax.random.key(1), 2)
    lhs, rhs = jax.random.normal(key[0], (64, 300)), jax.random.normal(key[1], (300, 32))
    result = transposed_grouped_matmul(lhs, rhs, jnp.array([100, 150, 50], dtype=jnp.int32))
    assert result.shape == (3, 64, 32)
    oracle.check(result, oracle.contraction(lhs.T, rhs, [100, 150, 50]))


def test_s1_11_all_remaining_groups(data):
    """S1-11: all groups from group_offset on are computed; a traced offset needs num_actual_groups."""
    x, y = data["x"], data["y"]
    for first in (0, 2):
        out = transposed_grouped_matmul(x.T, y, sizes_of(SHORT), group_offset=first)
        oracle.check(out, oracle.contraction(x, y, SHORT, first=first))
    with pytest.raises(ValueError, match="num_actual_groups: must be given when group_offset is traced"):
        jax.jit(lambda first: transposed_grouped_matmul(x.T, y, sizes_of(SHORT), group_offset=first))(1)


def test_s1_12_s1_13_accumulation(data):
    """S1-12, S1-13: float32 gradients of bfloat16 operands add up in place; an empty group changes nothing."""
    x, y, old = data["x"].astype(jnp.bfloat16), data["y"].astype(jnp.bfloat16), data["old_w"]
    out = transposed_grouped_matmul(x.T, y, sizes_of(SHORT))
    assert not out[1].any()
    out = transposed_grouped_matmul(x.T, y, sizes_of(SHORT), existing_out=old)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[1], old[1])
    oracle.check(out, oracle.contraction(x, y, SHORT, existing_out=old))
    with pytest.raises(ValueError, match="existing_out: want dtype float32"):
        transposed_grouped_matmul(x.T, y, sizes_of(SHORT), existing_out=old.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"existing_out: want shape \(4, 12, 7\)"):
        transposed_grouped_matmul(x.T, y, sizes_of(SHORT), existing_out=old[:3])


@pytest.mark.parametrize("poisoned", ["x", "y"])
@pytest.mark.parametrize("tiling", [None, (16, 8, 4)])
def test_s1_14_s1_15_nothing_leaks_from_other_rows(data, poisoned, tiling):
    """S1-14, S1-15: NaN in the rows of one group, and in unowned rows, of either operand reaches no other group."""
    bad = data | {poisoned: data[poisoned].at[9:22].set(jnp.nan).at[25:].set(jnp.inf)}  # group 2, and the tail
    out = transposed_grouped_matmul(bad["x"].T, bad["y"], sizes_of(SHORT), tiling=tiling)
    want = oracle.contraction(data["x"], data["y"], SHORT)
    clean = np.array([0, 1, 3])
    oracle.check(out[clean], want[clean])
    assert np.isnan(out[2]).all()


def test_s1_16_no_transposition(data):
    """S1-16: `trencadis.transposed_grouped_matmul` takes lhs as [m, k] too."""
    x, y = data["x"], data["y"]
    f = functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True)
    oracle.check(f(x, y, sizes_of(SHORT)), oracle.contraction(x, y, SHORT))
    assert "transpose[" not in str(jax.make_jaxpr(f)(x, y, sizes_of(SHORT)))


def test_s1_18_experts(data):
    """S1-18: a mixture of experts is sort, multiply, unsort."""
    expert = np.arange(M) % 4
    order = np.argsort(expert, kind="stable")
    out = grouped_matmul(data["x"][order], data["w"], jnp.bincount(expert, length=4))[np.argsort(order)]
    want = np.einsum("mk,mkn->mn", oracle.wide(data["x"]), oracle.wide(data["w"])[expert])
    oracle.check(out, want)


def test_s1_18_blocks_and_heads(data):
    """S1-18: a block-diagonal matrix, and weights over slices of the contracted axis, equal dense products."""
    x, w = oracle.wide(data["x"][:36]), oracle.wide(data["w"][:3])
    dense = np.zeros((36, 3 * N))
    for i in range(3):
        dense[12 * i : 12 * i + 12, N * i : N * i + N] = x[12 * i : 12 * i + 12] @ w[i]
    rows = grouped_matmul(data["x"][:36], data["w"][:3], sizes_of([12, 12, 12]))
    oracle.check(rows, sum(dense[:, N * i : N * i + N] for i in range(3)))
    heads = transposed_grouped_matmul(data["x"].T, data["y"], sizes_of([10, 20, 7]))
    oracle.check(heads.sum(axis=0), oracle.wide(data["x"]).T @ oracle.wide(data["y"]))
