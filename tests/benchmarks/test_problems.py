import numpy as np
import pytest

from benchmarks import problems


@pytest.mark.parametrize(
    "problem", [*problems.PROBLEMS.values(), *problems.SCALING_G, *problems.SCALING_M], ids=lambda p: p.name
)
def test_sizes_are_sound_and_the_same_each_time(problem):
    sizes = problem.group_sizes()
    assert sizes.shape == (problem.g,) and sizes.dtype == np.int32
    assert sizes.sum() == problem.m and (sizes >= 0).all()
    np.testing.assert_array_equal(sizes, problem.group_sizes())
    shape = problem.shape()
    assert problem.flops == 2 * problem.m * problem.k * problem.n == problems.useful_flops(shape, "d_lhs")
    assert problems.useful_flops(shape, "step") == 3 * problem.flops


def test_sizes_are_those_of_the_recipe():
    rng = np.random.default_rng(0)
    p = problems.PROBLEMS["qwen3-30b-a3b"]
    np.testing.assert_array_equal(p.group_sizes(), rng.multinomial(p.m, rng.dirichlet(np.full(p.g, 4.0))))
    b, d = problems.PROBLEMS["B"].group_sizes(), problems.PROBLEMS["D"].group_sizes()
    assert (b == 0).sum() == 8 and 1100 < b.max() < 1350
    assert 35 < (d > 0).sum() < 50 and d.max() < 8


def test_selection_and_its_errors():
    assert [p.name for p in problems.select("B,E", "cpu")] == ["B", "E"]
    assert [p.name for p in problems.select(None, "cpu")] == list("ABCDE")
    assert {p.name for p in problems.select(None, "cpu-scaled")} == {f"{p.name}-cpu" for p in problems.GPU}
    with pytest.raises(problems.UnknownName, match="nonsense not among"):
        problems.select("A,nonsense", "cpu")
    with pytest.raises(problems.UnknownName, match="tag: nonsense not among cpu"):
        problems.select(None, "nonsense")
    with pytest.raises(ValueError, match=r"sizes: want one of balanced.*; got 'nonsense'"):
        problems.group_sizes("nonsense", 8, 2)


def test_decode_problems_have_few_rows_in_a_group():
    chosen = [*problems.GPU, *problems.MORE, problems.TPU_DECODE]
    names = {p.name for p in chosen if problems.is_decode(p.shape())}
    assert names == {"decode-128", "mixtral-decode", "gpt-oss-decode", "chat-256", "dsv3-decode-tpu"}


def test_ragged_sizes_lie_in_their_range():
    for sizes in problems.RAGGED.draw()[1]:
        assert sizes.shape == (32,) and sizes.min() >= 64 and sizes.max() <= 512
