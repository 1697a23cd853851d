"""The decision how a problem is divided over a mesh, without a mesh."""

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core.arguments import problem_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.partition import dimensions, partition
from trencadis.core.problem import Form

pytestmark = pytest.mark.core

DEVICES = {"d": 2, "e": 4}


def spec(text):
    """A spec such as "de,," of three dimensions, the first over d and e."""
    return tuple(tuple(axes) for axes in text.split(","))


def divided(problem, lhs, rhs, out=None):
    rest = [((),) * len(names) for names in dimensions(problem)[2:]]
    return partition(problem, [spec(lhs), spec(rhs), *rest], DEVICES, None if out is None else spec(out))


def axes(part):
    return {name: "".join(part.over(name)) for name in "mkng" if part.over(name)}


def text(specs):
    return [",".join("".join(axes) for axes in each) for each in specs]


ROWS = problem_of((16, 8), (8, 8, 16))
SUMS = problem_of((8, 16), (16, 16), groups=8).replace(transpose_lhs=False)


@pytest.mark.parametrize(("lhs", "rhs", "out", "over", "result"), [
    (",", "e,,", None, {"g": "e"}, ","),
    (",", ",e,", None, {"k": "e"}, ","),
    (",e", ",,", None, {"k": "e"}, ","),  # of rhs each device takes its part
    (",", ",,e", None, {"n": "e"}, ",e"),
    ("d,", "e,,", None, {"m": "d", "g": "e"}, "d,"),
    ("de,", "e,,", None, {"m": "d", "g": "e"}, "de,"),  # rows are gathered over e and the result scattered
    (",e", ",,e", None, {"n": "e"}, ",e"),  # lhs is gathered along k
    (",", "e,,", "e,", {"g": "e"}, "e,"),
    (",", "e,d,", ",d", {"g": "e", "k": "d"}, ",d"),
    (",", ",,", "d,e", {"m": "d", "n": "e"}, "d,e"),  # nothing is sharded but the result
])  # fmt: skip
def test_rows(lhs, rhs, out, over, result):
    part = divided(ROWS, lhs, rhs, out)
    assert axes(part) == over
    assert text([part.result]) == [result]
    local = part.local
    assert (local.m, local.k, local.n, local.local_groups) == tuple(
        size // part.parts(part.over(name)) for name, size in (("m", 16), ("k", 8), ("n", 16), ("g", 8))
    )


@pytest.mark.parametrize(("lhs", "rhs", "out", "over", "result"), [
    ("d,", "d,", None, {"m": "d"}, ",,"),
    ("d,e", ",", None, {"m": "d", "k": "e"}, ",e,"),
    ("d,", "d,", "e,d,", {"m": "d", "g": "e"}, "e,d,"),  # a window of the groups, and a reduce-scatter along k
    ("d,", ",d", None, {"n": "d"}, ",,d"),
    (",d", ",d", ",d,", {"k": "d"}, ",d,"),
    (",d", ",d", None, {"n": "d"}, ",,d"),
])  # fmt: skip
def test_contraction(lhs, rhs, out, over, result):
    part = divided(SUMS, lhs, rhs, out)
    assert (axes(part), text([part.result])) == (over, [result])


def test_rows_and_matrices_over_one_axis_gather_fewer_bytes():
    """As in FSDP: matrices if there are many rows, rows if there are few; matrices over g never."""
    many, few = (problem_of((m, 64), (8, 64, 64)) for m in (8192, 16))
    for name, rhs in (("k", ",d,"), ("n", ",,d")):
        part = divided(many, "d,", rhs)
        assert axes(part) == {"m": "d"} and [each[0] for each in part.gathered] == [1]
        assert axes(divided(few, "d,", rhs)) == {name: "d"}
    assert axes(divided(many, "d,", "d,,")) == {"g": "d"}


def test_dimensions_that_do_not_divide_are_not_divided():
    uneven = problem_of((15, 6), (6, 6, 10))
    assert axes(divided(uneven, "d,d", "e,,d")) == {"n": "d"}
    along_k = ROWS.replace(k=96, epilogue=Epilogue(by_column=True, column_block=(32, 1)))
    assert axes(divided(along_k, ",e", ",e,")) == {}  # 24 of k are no whole blocks
    assert axes(divided(along_k.replace(k=128), ",e", ",e,")) == {"k": "e"}
    words = ROWS.replace(k=64, n=64, rhs=np.dtype(jnp.int8), transpose_rhs=True, interleaved=True)
    assert axes(divided(words, ",e", ",e,d")) == {"n": "e", "k": "d"}  # 16 of k are a run of interleaved weights
    assert axes(divided(words.replace(k=32), ",e", ",,e")) == {}
    batch = ROWS.replace(batch=2, m=8)
    assert axes(divided(batch, "d,", "e,,")) == {"m": "d", "g": "e"}
    assert axes(divided(batch, "e,", "e,,")) == {"g": "e"}  # half of an entry
    assert axes(divided(batch.replace(rhs_batch=2), "d,", "e,,")) == {}
    assert axes(divided(SUMS.replace(batch=2, m=8), "d,", "d,")) == {}
    assert axes(divided(ROWS.replace(k=4), ",d", ",e,")) == {"k": "e"}  # each divides it, both together do not
    assert axes(divided(SUMS.replace(batch=4, m=4, summed=True), "d,", "e,")) == {"m": "d"}


def test_exchanges_have_the_dtype_of_sums_or_of_the_result():
    half = ROWS.replace(out=np.dtype(jnp.bfloat16))
    (whole_rows,), (parts_of_sums,) = (divided(half, ",", rhs).exchanges for rhs in ("e,,", ",e,"))
    assert str(whole_rows) == "all-reduce of bfloat16[16,16] over e: 512 bytes"
    assert str(parts_of_sums) == "all-reduce of float32[16,16] over e: 1,024 bytes"
    gathered, scattered = divided(half, "de,", "e,,").exchanges
    assert (gathered.kind, gathered.shape, scattered.kind, scattered.shape) == (
        "all-gather", (8, 8), "reduce-scatter", (8, 16),
    )  # fmt: skip
    assert not divided(half, "d,", ",,e").exchanges


def test_every_operand_has_dimensions():
    steps = Epilogue(by_row=True, by_column=True, bias=np.dtype(np.float32), accumulate=True)
    for problem in (ROWS, SUMS.replace(form=Form.CONTRACTION)):
        problem = problem.replace(epilogue=steps)
        assert [len(names) for names in dimensions(problem)] == [len(shape) for shape, _ in problem.operands]
