"""What the programs are: the collectives that they hold, the bytes that these move, and the choice of a strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel import cases
from tests.support.sweep import sweep
from trencadis import moe, parallel
from trencadis.inspect.collectives import collectives
from trencadis.parallel.choice import choose

pytestmark = pytest.mark.core

SHARDS = 4
SIZES = {"shards": SHARDS, "tokens": cases.T // SHARDS, "k": cases.K, "local": cases.E // SHARDS}


def mapped(**options):
    """The layer without its load."""

    def local(experts, x, weights, *params):
        routing = moe.Routing(experts, weights, jnp.zeros((x.shape[0], cases.E)), jnp.zeros(cases.E, jnp.int32))
        return parallel.expert_parallel(x, routing, *params, axis="e", backend="reference", **options)[0]

    return jax.shard_map(local, mesh=cases.mesh_of(SHARDS), in_specs=P("e"), out_specs=P("e"))


def given(*names):
    numbers = cases.numbers()
    return cases.routings()["random"], *(numbers[name] for name in names)


@functools.cache
def forward(**options):
    """The layer, traced."""
    return jax.jit(mapped(**options)).trace(*given("x", "weights", "gate", "up", "down"))


def step(**options):
    """The layer and its gradients in everything."""

    def both(experts, ct, *inputs):
        y, pull = jax.vjp(functools.partial(mapped(**options), experts), *inputs)
        return y, pull(ct)

    return jax.jit(both).trace(*given("ct", "x", "weights", "gate", "up", "down"))


BYTES = [
    ("all_gather", {}, step),
    ("all_to_all", {"capacity": 8}, step),
    ("ragged", {"ordered": True}, step),
    ("all_gather", {"ordered": True}, forward),
]
MORE = [(strategy, options, program) for strategy, options, _ in BYTES for program in (forward, step)]


@pytest.mark.parametrize(("strategy", "options", "program"), sweep(MORE, BYTES))
def test_bytes_are_those_of_the_formula(strategy, options, program):
    """On CPUs, "ragged" moves blocks of the worst case, and the number of rows of each pair."""
    found = collectives(program(strategy=strategy, **options).lower().compile().as_text(), SHARDS)
    formula = functools.partial(
        parallel.bytes_moved, "all_to_all" if strategy == "ragged" else strategy, **SIZES, row=4 * cases.D,
        capacity=options.get("capacity"),
    )  # fmt: skip
    counts = 4 * SHARDS * (SHARDS - 1) if strategy == "ragged" else 0
    backward = formula(backward=True) if program is step else 0
    assert sum(each.received for each in found) == formula() + counts + backward
    assert {each.group for each in found} == {SHARDS}
    if options.get("ordered"):
        assert not {each.kind for each in found} & {"reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_ragged_lowers_to_the_ragged_collective(platform):
    text = forward(strategy="ragged").lower(lowering_platforms=(platform,)).as_text()
    assert "ragged_all_to_all" in text
    assert "stablehlo.all_to_all" not in text


def test_the_choice():
    """Gather for few shards, send what there is for many; on CPUs and very many GPUs, padding must pay."""
    sizes = {"tokens": 1024, "k": 8, "capacity": None}
    assert choose("tpu", shards=8, local=16, **sizes) == "all_gather"
    assert choose("tpu", shards=64, local=2, **sizes) == "ragged" == choose(None, shards=64, local=2, **sizes)
    assert choose("gpu", shards=32, local=4, **sizes) == "ragged"
    assert choose("gpu", shards=64, local=4, **sizes) == "all_gather" == choose("cpu", shards=64, local=4, **sizes)
    tight = sizes | {"capacity": 10 * 1024}
    assert choose("gpu", shards=64, local=4, **tight) == "all_to_all" == choose("cpu", shards=64, local=4, **tight)


def test_the_platform_is_that_of_the_mesh():
    """On virtual CPU devices nothing ragged is chosen, whatever the number of shards."""
    kinds = {each.kind for each in collectives(forward().lower().compile().as_text(), SHARDS)}
    assert kinds == {"all-gather", "reduce-scatter"}


def test_the_bias_is_that_of_all_shards():
    sizes = np.array([[1, 2, 3], [3, 2, 1], [5, 2, 0], [0, 3, 5]])
    local = lambda rows: moe.update_bias(jnp.zeros(3), rows[0], 0.5, axis_name="e")
    bias = jax.shard_map(local, mesh=cases.mesh_of(4), in_specs=P("e"), out_specs=P())(sizes)
    np.testing.assert_array_equal(bias, moe.update_bias(jnp.zeros(3), jnp.asarray(sizes.sum(0)), 0.5))
