"""The static description of a general GEMM: its gradients, its batches, and what it refuses."""

import itertools

import numpy as np
import pytest

from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups, Packing

pytestmark = pytest.mark.core

F32 = np.dtype("float32")


def buffer(first, second, transposed=False, groups=3):
    """How a tensor with these dimensions is stored."""
    ragged = first.ragged, second.ragged
    match sum(ragged):
        case 0:
            shape = (groups, first.size, second.size)
        case 1:
            shape = (first.size, second.size)
        case _:
            shape = (40,)
    stored = (*shape[:-2], *shape[-2:][::-1]) if transposed and len(shape) > 1 else shape
    return Buffer(shape=stored, dtype=F32, ragged=ragged, transposed=transposed)


def problem(case, transposes=(False, False)):
    m, k, n = (Dim(size=7 if on else size, ragged=on) for on, size in zip(case, (2, 3, 4), strict=True))
    lhs, rhs, out = buffer(m, k, transposes[0]), buffer(k, n, transposes[1]), buffer(m, n)
    known = Groups(*((i, i + 1, i + 2) for i in range(6)))
    return GemmProblem(groups=3, m=m, k=k, n=n, lhs=lhs, rhs=rhs, out=out, known=known)


@pytest.mark.parametrize("case", list(itertools.product([False, True], repeat=3)), ids=str)
def test_the_gradients_of_a_gradient_give_the_problem_back(case):
    """d_lhs and d_rhs undo themselves, and the gradient of lhs has the buffer and the groups of lhs as its result."""
    for transposes in itertools.product([False, True], repeat=2):
        one = problem(case, transposes)
        assert one.d_lhs().d_lhs() == one and one.d_rhs().d_rhs() == one
        assert (one.d_lhs().out, one.d_lhs().known.out) == (one.lhs, one.known.lhs)
        assert (one.d_rhs().out, one.d_rhs().known.out) == (one.rhs, one.known.rhs)
        assert one.lhs.flip().group_axis == one.lhs.group_axis  # the array is the same
        many = one.repeated(5)
        assert many.groups == 15 and many.known is None
        for each, all_of in ((one.lhs, many.lhs), (one.rhs, many.rhs), (one.out, many.out)):
            assert np.prod(all_of.shape) == 5 * np.prod(each.shape)
            assert (all_of.packing, all_of.group_axis) == (each.packing, each.group_axis)


def test_where_groups_follow_one_another():
    ragged, plain = Dim(size=7, ragged=True), Dim(size=2)
    assert buffer(ragged, plain).group_axis == 0 and buffer(plain, ragged).group_axis == 1
    assert buffer(ragged, plain, transposed=True).group_axis == 1
    assert buffer(plain, plain).packing is Packing.STACKED and buffer(ragged, ragged).packing is Packing.FLAT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"m": Dim(size=2)}, "lhs: want ragged"),
        ({"rhs": Buffer(shape=(2, 3, 4), dtype=F32, ragged=(False, False))}, "rhs: want 3 dimensions for 3 groups"),
        ({"out": Buffer(shape=(7,), dtype=F32, ragged=(True, False))}, "out: want 2 dimensions"),
        ({"known": Groups(*((0,) for _ in range(6)))}, "known: want starts and sizes of 3 groups"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        problem((True, False, False)).replace(**changes)
