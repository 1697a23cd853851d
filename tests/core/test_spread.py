"""Gradients of arrays that all devices have are their sums, whatever their size, and in place where XLA can."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from trencadis.core.spread import LARGE, spread

pytestmark = pytest.mark.core


@pytest.mark.parametrize("size", [6, LARGE // 4])
def test_gradients_are_sums_over_devices(size):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, factor = jnp.arange(size, dtype=jnp.float32) % 7, jnp.array([2.0, 3.0])
    local = lambda x, factor: jnp.sum(spread(x, ("d",)) ** 2 * factor)[None]
    loss = lambda x: jnp.sum(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(x, factor))
    program = jax.jit(jax.grad(loss)).lower(x).compile()
    np.testing.assert_array_equal(program(x), 10 * x)
    kinds = set(re.findall(r" (all-reduce|reduce-scatter|all-gather)\(", program.as_text()))
    assert kinds == ({"all-reduce"} if size == 6 else {"reduce-scatter", "all-gather"})
