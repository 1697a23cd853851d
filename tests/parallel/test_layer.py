"""Expert parallelism equals a loop over tokens and experts in float64, for every strategy and number of shards."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tests.parallel import cases
from tests.support import moe_oracle
from tests.support.sweep import sweep
from trencadis import moe, parallel, quant

pytestmark = pytest.mark.core

PROGRAMS = list(itertools.product(parallel.STRATEGIES, [1, 2, 4, 8]))
DEFAULT = [("all_gather", 8), ("all_to_all", 8), ("ragged", 2)]
ALL = pytest.mark.parametrize("strategy", parallel.STRATEGIES)


def meaning(experts, given):
    """The result and the gradients in the order of `cases.step`."""
    params = {name: given[name] for name in ("gate", "up", "down")} | dict.fromkeys(moe_oracle.NAMES[3:])
    y, gradients = moe_oracle.layer(given["x"], experts, given["weights"], params, given["ct"])
    return [y, *(gradients[name] for name in ("x", "weights", "gate", "up", "down"))]


def check(got, experts, given):
    """Values and gradients are right, and the load is that of the experts' rows."""
    y, gradients, load = got
    for found, want in zip([y, *gradients], meaning(experts, given), strict=True):
        oracle.check(found, want)
    return load


def rows_of(experts):
    return np.bincount(experts.ravel(), minlength=cases.E + 1)[: cases.E]


@pytest.mark.parametrize(("strategy", "shards"), sweep(PROGRAMS, DEFAULT))
def test_equals_the_loop(strategy, shards):
    """Whatever the routing; a masked token's NaN reaches nothing, and nothing is dropped."""
    given, call = cases.numbers(), cases.step(shards, strategy=strategy)
    for name, experts in cases.routings().items():
        if name == "masked":
            given = given | {"x": np.where((experts == cases.E).all(1, keepdims=True), np.nan, given["x"])}
        load = check(cases.run(call, experts, given), experts, given)
        rows, local = rows_of(experts), cases.E // shards
        if name not in ("empty", "twice") or local >= cases.K:  # elsewhere a repeated expert is computed once
            np.testing.assert_array_equal(load.rows, rows)
            np.testing.assert_allclose(load.imbalance, rows.max() / max(rows.mean(), 1e-30), rtol=1e-6)
        np.testing.assert_array_equal(load.dropped, np.zeros(shards))


def kept(strategy, experts, shards, capacity):
    """Which assignments a numpy loop computes: those of earlier shards and tokens, until there is no room."""
    local, each = cases.E // shards, -(-capacity // shards)
    room = np.full((shards, shards), each) if strategy == "all_to_all" else np.full(shards, capacity)
    found = np.zeros(experts.shape, bool)
    for t, j in np.ndindex(experts.shape):
        source, target = t // (cases.T // shards), experts[t, j] // local
        if target < shards:
            at = (source, target) if strategy == "all_to_all" else target
            found[t, j], room[at] = room[at] > 0, room[at] - 1
    return found


@pytest.mark.sweep
@ALL
def test_two_axes_as_one(strategy):
    """Tokens and experts over two mesh axes, in the order of the first and then the second."""
    given, experts, both = cases.numbers(), cases.routings()["uneven"], ("d", "e")
    mesh = jax.make_mesh((2, 2), both, axis_types=(cases.AUTO,) * 2, devices=jax.devices()[:4])
    check(cases.run(jax.jit(cases.uncompiled(mesh, both, strategy=strategy)), experts, given), experts, given)


@ALL
def test_drops_are_counted_and_add_nothing(strategy):
    shards, capacity = 4, 6
    given, call = cases.numbers(), cases.step(shards, strategy=strategy, capacity=capacity)
    for name, experts in cases.routings().items():
        there = kept(strategy, experts, shards, capacity)
        left = np.where(there, experts, cases.E)
        load = check(cases.run(call, experts, given), left, given)
        np.testing.assert_array_equal(load.rows, rows_of(left))
        lost = (rows_of(experts) - rows_of(left)).reshape(shards, -1).sum(1)
        np.testing.assert_array_equal(load.dropped, lost)
        assert lost.any() or name == "none"


def test_ids_that_cannot_hold_no_expert(x64):
    """256 is no uint8; and counts are int32, as they are without 64 bits."""
    x, up, down = jnp.zeros((2, 1)), jnp.zeros((256, 1, 1)), jnp.zeros((256, 1, 1))
    routing = moe.Routing(jnp.array([[7], [255]], jnp.uint8), jnp.ones((2, 1)), None, jnp.zeros(256, jnp.int32))
    options = {"axis": "e", "mesh": cases.mesh_of(1), "strategy": "all_to_all", "activation": jax.nn.relu}
    load = jax.jit(lambda: parallel.moe_mlp(x, routing, None, up, down, **options)[1])()
    assert np.flatnonzero(load.rows).tolist() == [7, 255] and load.dropped.dtype == jnp.int32


OPTIONS = {
    "ordered": ("all_gather", {"ordered": True}),
    "ordered all_to_all": ("all_to_all", {"ordered": True}),
    "ordered ragged": ("ragged", {"ordered": True}),
    "chunks": ("all_gather", {"chunks": 2}),
    "ordered chunks": ("all_gather", {"chunks": 2, "ordered": True}),
    "chunks all_to_all": ("all_to_all", {"chunks": 2, "ordered": True}),
    "chunks ragged": ("ragged", {"chunks": 2}),
}


@pytest.mark.parametrize("name", sweep(OPTIONS, ["ordered chunks"]))
def test_options_change_nothing(name):
    given, experts = cases.numbers(), cases.routings()["uneven"]
    strategy, options = OPTIONS[name]
    check(cases.run(cases.step(2, strategy=strategy, **options), experts, given), experts, given)


@pytest.mark.parametrize("strategy", sweep(parallel.STRATEGIES, ["all_gather"]))
def test_tokens_travel_in_eight_bits(strategy):
    """The layer of rounded tokens; the gradient passes the rounding, and results and gradients are not rounded."""
    given, experts = cases.numbers(), cases.routings()["random"]
    rounded = quant.quantize(jnp.asarray(given["x"]), "float8_e4m3fn", "row").dequantize()
    got = cases.run(cases.step(2, strategy=strategy, dispatch="float8_e4m3fn"), experts, given)
    check(got, experts, given | {"x": np.asarray(rounded)})


def test_no_tokens():
    """Nothing travels, and gradients are 0."""
    given = {name: x[:0] if name in ("x", "ct", "weights") else x for name, x in cases.numbers().items()}
    y, gradients, load = cases.run(cases.step(2), cases.routings()["one"][:0], given)
    assert y.shape == (0, cases.D) and not any(np.any(g) for g in gradients)
    assert not load.rows.any() and not load.dropped.any() and load.imbalance == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "mesh"}, "strategy: want one of 'all_gather', 'all_to_all', 'ragged' or None; got 'mesh'"),
        ({"capacity": 0}, "capacity: want an int of at least 1 row, or None; got 0"),
        ({"capacity": 1.25}, "capacity: want an int of at least 1 row, or None; got 1.25"),
        ({"chunks": 9}, "chunks: want an int between 1 and the 8 tokens of x; got 9"),
        ({"chunks": 1.5}, "chunks: want an int between 1 and the 8 tokens of x; got 1.5"),
        ({"dispatch": "int4"}, "dispatch: want a format of 8 bits"),
        ({"dispatch": "int3"}, "dispatch: format: want one of int8"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *xs: cases.run(cases.step(2, **options), *xs), cases.routings()["one"], cases.numbers())


def test_options_are_those_of_a_shard():
    """A window of the experts is chosen by the shard, and not by the caller."""
    with pytest.raises(TypeError, match="group_offset: no option of this layer; want one of bias_gate"):
        jax.eval_shape(
            lambda *xs: cases.run(cases.step(2, group_offset=1), *xs), cases.routings()["one"], cases.numbers()
        )


def test_a_call_outside_of_shard_map_says_so():
    routing = moe.route(jnp.ones((4, 2)), 1)
    with pytest.raises(ValueError, match=r"axis: want a mesh axis of the jax.shard_map .* got 'expert'"):
        parallel.expert_parallel(jnp.ones((4, 2)), routing, None, *[jnp.ones((2, 2, 2))] * 2, axis="expert")
    with pytest.raises(ValueError, match=r"axis: want a mesh axis of the jax.shard_map"):
        parallel.gather_weights(jnp.ones((2, 2, 2)), "expert")
    with pytest.raises(ValueError, match="strategy: want one of"):
        parallel.bytes_moved("foo", shards=4, tokens=1, k=1, local=1, row=1)
    with pytest.raises(ValueError, match="shards: want an int of at least 1; got 0"):
        parallel.bytes_moved("ragged", shards=0, tokens=1, k=1, local=1, row=1)
