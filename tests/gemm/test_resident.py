"""The TPU kernel of the general form for groups whose rhs fits into VMEM: values in the interpreter, and its tables."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax.experimental.pallas import tpu as pltpu
from sweep import sweep

from tests.gemm.drawn import KINDS, check_values, drawn, flat_problem, whole_strides
from trencadis.backends.tpu.ragged.flat import TILE
from trencadis.backends.tpu.resident.align import MARGIN
from trencadis.backends.tpu.resident.sizes import Sizes
from trencadis.backends.tpu.resident.table import FIELDS
from trencadis.core.devices import CHIPS
from trencadis.gemm import resident
from trencadis.gemm.flat import flattened
from trencadis.gemm.problem import Groups

pytestmark = pytest.mark.core

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
# groups of two panels, steps and blocks; of two chunks of a row; an empty one, a sum of no terms, too long a row
SIZES = [20, 3, 0, 4, 1], [130, 2, 3, 0, 1], [260, 2100, 2, 5, 2601]
SHORT = [17, 1, 0, 1, 1], [130, 2, 3, 0, 1], [40, 4, 2, 5, 2601]  # two panels and steps: less to compute
ROOMS = 2700, 41000, 14200


def small(problem, **changes):
    """A layout of few rows, if lhs is not transposed: buffers are used again, and a strip has two slots of rows."""
    rows, longest = 256 if flattened(problem).lhs.transposed else 16, 2600
    sizes = Sizes(
        rows=rows, depth=max(rows, 128), products=2, longest=longest, strip=4096, sums=44, slot_rows=4, converted=1,
        raw=2 * (-(-rows * longest // TILE) + MARGIN), lhs=0, rhs=0,
    )  # fmt: skip
    left, right = resident.operands(flattened(problem), sizes)
    return dataclasses.replace(sizes, lhs=5 * left.tile, rhs=12 * right.tile, **changes)


APART = dict(overlap=False, row_slots=0, products=1, slot_rows=1)  # nothing among products: less to compile
CASES = [(*KINDS[0], SHORT, {**APART, "cores": 2}), *((*kind, SIZES, {}) for kind in KINDS)]
# two cores: both have rows in a piece, only the second has any, none has, sums of no terms, pieces that end with rows
SEAMS = [
    ([17, 1, 0, 1, 1], [130, 2, 3, 0, 1], [40, 4, 2, 5, 1300]),
    ([0, 0, 20, 0, 0], [1, 2, 130, 3, 4], [5, 6, 260, 3, 2]),
    ([0] * 5, [1] * 5, [3] * 5),
    ([4] * 5, [0] * 5, [512, 512, 511, 1, 3]),
    ([1, 1, 1, 1, 18], [1, 1, 1, 1, 20], [5, 6, 7, 8, 700]),
    ([2] * 5, [3] * 5, [1024, 1024, 1000, 1024, 1024]),
]


@pytest.mark.once
@pytest.mark.parametrize(("dtype", "transposes", "epilogue", "sizes", "changes"), sweep(CASES, CASES[:1]))
def test_values_are_those_of_a_loop(dtype, transposes, epilogue, sizes, changes, rng):
    """Nothing leaks: unowned entries are NaN, and uninitialized memory is too; rows that are too long go to XLA."""
    problem, operands, want = drawn(rng, sizes, ROOMS, dtype, transposes, **epilogue)
    execute = functools.partial(resident.execute, problem, small(problem, **changes), interpret=STRICT)
    check_values(problem, execute, operands, want, dtype, transposes)


@pytest.mark.sweep
def test_a_bias_is_added_to_each_chunk_of_a_row(rng):
    m, k, n = [20, 3, 2], [130, 2, 3], [260, 2100, 1500]
    problem, operands, want = drawn(rng, (m, k, n), (2700, 42700, 14600), "float32", (False,) * 3)
    problem = problem.replace(bias=True, wide=np.dtype(np.float32))
    bias = rng.normal(size=(3, problem.n.size)).astype(np.float32)
    start = 0
    for i, (rows, columns) in enumerate(zip(m, n, strict=True)):
        want[start : start + rows * columns] += np.tile(bias[i, :columns], rows)
        start += rows * columns
    call = functools.partial(resident.execute, problem, small(problem, **APART), interpret=STRICT)
    out, left = jax.jit(call)(*operands, bias)
    assert not np.any(left)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-5, atol=4e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_values_with_the_sizes_of_a_chip(chip, rng):
    """Two panels, steps and blocks of the products that run on a chip, and rows of three chunks."""
    sizes, rooms = ([300, 0, 70], [520, 7, 130], [2100, 5, 30]), (170000, 1100000, 640000)
    problem, operands, want = drawn(rng, sizes, rooms, "bfloat16", (False,) * 3, accumulate=True)
    layout = resident.layout_for(flat_problem([2304] * 32), CHIPS[chip])
    out, left = jax.jit(functools.partial(resident.execute, problem, layout, interpret=STRICT))(*operands)
    assert not np.any(left)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2**-7, atol=0.3)


@pytest.mark.sweep
@pytest.mark.parametrize("epilogue", [{}, {"accumulate": True}], ids=["zeros", "existing"])
def test_cores_meet_inside_of_pieces_of_the_result(epilogue, rng):
    for room in (14200, 12640):
        cases = [drawn(rng, sizes, (2700, 41000, room), "bfloat16", (False,) * 3, **epilogue) for sizes in SEAMS]
        problem = cases[0][0]
        layout = small(problem, cores=2, **APART)
        call = jax.jit(functools.partial(resident.execute, problem, layout, interpret=STRICT))
        for _, operands, want in cases:
            out, left = call(*operands)
            assert not np.any(left)
            np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2**-7, atol=0.3)


@pytest.mark.sweep
@pytest.mark.parametrize(("cores", "sizes", "changes"), [(1, SIZES, {}), (2, SEAMS[0], APART)])
def test_there_is_no_race(cores, sizes, changes, rng, monkeypatch):
    whole_strides(monkeypatch, race_detection_state)
    problem, operands, _ = drawn(rng, sizes, ROOMS, "bfloat16", (False,) * 3)
    strict = dataclasses.replace(STRICT, detect_races=True, num_cores_or_threads=cores)
    layout = small(problem, cores=cores, **changes)
    jax.block_until_ready(jax.jit(functools.partial(resident.execute, problem, layout, interpret=strict))(*operands))
    assert not interpreter.races.races_found


# ---------------------------------------------------------------------------------------------------------------------
# The layout and the table


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2304), ("float32", 1200), ("bfloat16", 40)])
def test_the_layout_fits_into_vmem(chip, transposed, dtype, size):
    """First-in-first-out buffers have room for two of the largest pieces: with less they could wait for each other."""
    problem = flat_problem([size] * 32, dtype)
    problem = problem.replace(lhs=dataclasses.replace(problem.lhs, transposed=transposed))
    sizes = resident.layout_for(problem, CHIPS[chip])
    if sizes is None:
        assert size > 40 and CHIPS[chip].vmem < (128 << 20)
        return
    scratch = [x for x in resident.kernel_of(problem, sizes).scratch().values()]
    in_vmem = [x for x in scratch if getattr(x, "memory_space", None) == pltpu.VMEM]
    assert sum(np.prod(x.shape) * np.dtype(x.dtype).itemsize for x in in_vmem) <= 0.96 * CHIPS[chip].vmem
    assert sizes.sums >= 2 * sizes.longest // 128 and sizes.raw * TILE >= 2 * sizes.rows * sizes.longest
    left, _ = resident.operands(problem, sizes)
    assert transposed or sizes.lhs >= 2 * -(-sizes.longest // sizes.depth) * left.tile


def test_groups_that_do_not_fit_are_left_to_loops():
    """A row of many entries is too long for the buffers; the other groups are computed by the kernel."""
    problem = flat_problem([300] * 3)
    layout = resident.layout_for(problem, CHIPS["v6e"])
    starts, sizes = ([0, 9, 70000], [0, 9, 18], [0, 9, 18]), ([3, 1, 20], [3, layout.longest + 1, 20], [3, 1, 20])
    groups = Groups(*(jnp.asarray(x, jnp.int32) for x in (*starts, *sizes)))
    found = resident.tables(problem, layout, groups)
    assert found.left.tolist() == [False, True, False]
    table = np.asarray(found.table[:-2]).reshape(len(FIELDS), -1)
    assert found.table[-2:].tolist() == [0, 2] and table[FIELDS.index("group"), :2].tolist() == [0, 2]
    assert table[FIELDS.index("lhs_start"), :2].tolist() == [0, 70000]


def test_a_large_transposed_lhs_is_several_entries():
    """Its columns are rows of the result, and those that fit into VMEM at a time are an entry of the table."""
    problem = flat_problem([2000] * 16)
    problem = problem.replace(lhs=dataclasses.replace(problem.lhs, transposed=True))
    layout = resident.layout_for(problem, CHIPS["v6e"])
    zero, m, k, n = (jnp.asarray([0] * 15 + [x], jnp.int32) for x in (0, 8000, 4000, 400))
    found = resident.tables(problem, layout, Groups(zero, zero, zero, m, k, n))
    fields = dict(zip(FIELDS, np.asarray(found.table[:-2]).reshape(len(FIELDS), -1), strict=True))
    count = int(found.table[-1])
    assert not found.left.any() and count > 1
    rows = fields["m"][:count]
    assert rows.sum() == 8000 and (rows[:-1] % layout.rows == 0).all()
    first = np.cumsum(rows) - rows
    assert (fields["lhs_start"][:count] == first).all() and (fields["start"][:count] == first * 400).all()


@pytest.mark.parametrize("sizes", [[300] * 7, [700, 10, 10, 10, 10, 10, 10], [10, 0, 0, 0, 0, 0, 700]])
def test_cores_share_the_work(sizes):
    """Each has groups that follow one another, and no more than half of the products but for half of a group's."""
    problem = flat_problem([300] * 7)
    layout = resident.layout_for(problem, CHIPS["v5p"])
    assert layout.cores == 2 and resident.layout_for(problem, CHIPS["v6e"]).cores == 1
    starts = jnp.cumsum(jnp.asarray([0, *(x * x for x in sizes[:-1])]), dtype=jnp.int32)
    found = resident.tables(problem, layout, Groups(starts, starts, starts, *[jnp.asarray(sizes, jnp.int32)] * 3))
    first, second, count = found.table[-3:].tolist()
    owned = np.asarray([size for size in sizes if size])
    work = np.prod([-(-owned // size) for size in (layout.rows, layout.depth, 256)], axis=0)
    assert first == 0 and count == len(work)
    assert abs(work[:second].sum() - work[second:].sum()) <= work.max()
