import dataclasses

import pytest

from benchmarks import measure, peers
from benchmarks.problems import UnknownName

from .fakes import TINY


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("which", peers.PASSES)
def test_contenders_agree_with_float64(dtype, which):
    x = peers.operands(TINY, dtype)
    calls, found = measure.entrants(x, dtype, which, list(peers.PEERS.values()))
    assert set(calls) >= {"ours", "numpy", "dense", "ragged_dot"}, found
    assert set(found) == set(peers.PEERS)
    assert all(found[name].error <= measure.tolerance(x, which) and not found[name].why for name in calls)
    assert all(found[name].why for name in set(peers.PEERS) - set(calls))


def test_those_who_cannot_run_say_why():
    huge = dataclasses.replace(TINY, m=1 << 20, k=1 << 10, g=64)
    x = dataclasses.replace(peers.operands(TINY, "f32"), problem=huge)
    assert "GiB of temporary memory" in peers.PEERS["ragged_dot"].absent(x)
    assert "TPU only" in peers.PEERS["megablox"].absent(x)
    assert [p.name for p in peers.select("numpy")] == ["ours", "numpy"]
    assert [p.name for p in peers.select("mgpu", ("ours", "dense"))] == ["ours", "dense", "mgpu8", "mgpu4"]
    with pytest.raises(UnknownName, match="peers: nobody not among ours"):
        peers.select("nobody")
