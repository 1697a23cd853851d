"""The list of tiles by the kernel, in Triton's interpreter, against the same list by XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.backends.triton import bridge, tile_kernels, tile_scheduler
from trencadis.backends.triton.layout import Layout
from trencadis.core.arguments import problem_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Form

LAYOUT = Layout(block_m=4, block_n=16, block_k=8, warps=4, stages=2)
# groups, local groups, batch entries and rows of each
WINDOWS = {"all": (5, 5, 1, 40), "window": (5, 3, 1, 40), "batch": (3, 2, 2, 12)}


def problem_with(window, **changes):
    groups, local, batch, m = WINDOWS[window]
    return problem_of((m, 24), (groups, 24, 40), groups=groups).replace(local_groups=local, batch=batch, **changes)


@functools.cache
def lists_of(problem, layout):
    by_kernel = functools.partial(tile_scheduler.tiles, problem, layout, arch="9.0", interpret=True)
    by_xla = functools.partial(tile_scheduler.tiles_by_xla, problem, layout)
    return jax.jit(lambda *given: (by_kernel(*given), by_xla(*given)))


def both(problem, layout, sizes, first):
    found = lists_of(problem, layout)(jnp.asarray(sizes, jnp.int32), jnp.asarray(first, jnp.int32))
    return [[np.asarray(x).tolist() for x in each] for each in found]


def rows_of(listed):
    """The rows of all tiles of a list, in order."""
    (_, used), _, row, end = listed
    return sorted(r for a, b in zip(row[:used], end[:used], strict=True) for r in range(a, min(a + LAYOUT.block_m, b)))


@st.composite
def sizes_and_windows(draw, window):
    """Whatever a traced array may hold: negative sizes, sums past m, windows outside of all groups."""
    groups, local, batch, m = WINDOWS[window]
    offset = st.one_of(st.integers(-local, groups), st.sampled_from([-(2**31), 2**31 - 1]))
    sizes = draw(st.lists(st.integers(-2, m // 2), min_size=batch * groups, max_size=batch * groups))
    return np.reshape(sizes, (batch, groups)), draw(st.lists(offset, min_size=batch, max_size=batch))


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_row_tiles(window, data):
    for epilogue in (Epilogue(), Epilogue(accumulate=True)):
        mine, other = both(problem_with(window, epilogue=epilogue), LAYOUT, *data.draw(sizes_and_windows(window)))
        owned = mine[0][0]
        assert mine[0] == other[0] and [x[:owned] for x in mine[1:]] == [x[:owned] for x in other[1:]]
        assert rows_of(mine) == rows_of(other)  # in which tiles unowned rows are does not matter
        assert set(mine[1][owned : mine[0][1]]) <= {-1}


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_sums_of_a_contraction(window, data):
    problem = problem_with(window, form=Form.CONTRACTION)
    for programs in (0, 7):
        mine, other = both(problem, LAYOUT.replace(programs=programs), *data.draw(sizes_and_windows(window)))
        assert mine[1:] == other[1:] and (programs == 0 or mine[0] == other[0])


def test_sums_of_sizes_that_pass_32_bits():
    problem = problem_of((2**30, 16), (5, 16, 16))
    mine, other = both(problem, LAYOUT.replace(block_m=2**29), np.full((1, 5), 2**30 - 3), [0])
    assert mine[0] == other[0] == [3, 3] and [x[:3] for x in mine[1:]] == [x[:3] for x in other[1:]]


@pytest.mark.parametrize("arch", ["8.0", "9.0", "10.0", "gfx942"])
def test_compiles(arch):
    for form, layout in ((Form.ROWS, LAYOUT), (Form.CONTRACTION, LAYOUT.replace(programs=7))):
        function = tile_kernels.list_rows if form is Form.ROWS else tile_kernels.list_contraction
        names = ("sizes", "first", "number", "group_of", "row_of", "end_of")
        constants = tile_scheduler._constants(problem_with("batch", form=form), layout)
        kernel = bridge.Kernel(
            function=function, pointers=tuple((name, "int32") for name in names), constants=tuple(constants.items()),
            arch=arch, warps=4, stages=1,
        )  # fmt: skip
        assert "atom" not in bridge.compiled(kernel).text


def test_many_groups_are_listed_by_xla():
    problem = problem_of((64, 16), (2 * tile_scheduler.MOST_GROUPS, 16, 16))
    listed = jax.make_jaxpr(functools.partial(tile_scheduler.tiles, problem, LAYOUT, arch="9.0"))
    text = str(listed(jnp.zeros((1, problem.groups), jnp.int32), jnp.zeros((1,), jnp.int32)))
    assert "trencadis_triton" not in text
