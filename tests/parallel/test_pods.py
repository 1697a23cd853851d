"""A training step compiles for whole pods, with kernels and the collectives of its strategy."""

import itertools

import pytest

from scripts import pods
from tests.support.sweep import sweep
from trencadis import parallel
from trencadis.inspect.aot import _ENVIRONMENT
from trencadis.parallel.network import Pod, step_times

PODS = list(itertools.product(["v5e:4x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4"], parallel.STRATEGIES))
KINDS = {"all_gather": "all-", "all_to_all": "6 all-to-all", "ragged": "6 ragged-all-to-all"}
KERNELS = {
    "all_gather": 10,
    "all_to_all": 12,
    "ragged": 12,
}  # eight products; others gather rows, and sum them by token


@pytest.mark.parametrize(("pod", "strategy"), sweep(PODS, [("v5e:4x4", "ragged")]))
def test_compiles_for_a_pod(monkeypatch, pod, strategy):
    """Tokens, results and what goes with tokens travel, and the gradients of the three."""
    for name, value in {**_ENVIRONMENT, "TPU_LOG_DIR": "disabled"}.items():
        monkeypatch.setenv(name, value)
    *_, kernels, kinds, _, _, _ = pods.report(pod, pods.MODELS["small"], strategy, None).split(" | ")
    assert int(kernels) == KERNELS[strategy] and KINDS[strategy] in kinds


def test_times_by_hand():
    """An exchange on an open 8 x 8 mesh: half of 32 devices' bytes through 8 links, in each direction."""
    pod = Pod.named("v6e:8x8")
    assert pod.devices == 64 and pod.bisection == 8 * 100e9 and not pod.closed
    times = step_times(pod, "all_to_all", tokens=64, k=2, d=128, f=32, local=2, capacity=128)
    assert times.bytes == 2 * 63 * 2 * (2 * 256 + 8)
    assert times.communication == 32 * times.bytes / 2 / 800e9
    assert times.products == 18 * 64 * 2 * 128 * 32 / 918e12
    gathered = step_times(Pod.named("v6e:16x16"), "all_gather", tokens=64, k=2, d=128, f=32, local=1)
    assert gathered.communication == gathered.bytes / 400e9
    assert Pod.named("tpu7x:4x4x4").devices == 128
