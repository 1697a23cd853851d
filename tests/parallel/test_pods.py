"""A training step compiles for whole pods, with kernels and the collectives of its strategy."""

import collections
import dataclasses
import itertools
import re

import pytest

from scripts import pods
from tests.support.sweep import sweep
from trencadis import parallel
from trencadis.inspect.aot import ENVIRONMENT
from trencadis.inspect.collectives import collectives
from trencadis.parallel import Pod, step_times

PODS = list(itertools.product(["v5e:4x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4"], parallel.STRATEGIES))
EXCHANGES = {"all_gather": {}, "all_to_all": {"all-to-all": 6}, "ragged": {"ragged-all-to-all": 6}}
KERNELS = {
    "all_gather": 10,
    "all_to_all": 12,
    "ragged": 12,
}  # eight products; others gather rows, and sum them by token
SMALL = pods.MODELS["small"]


@pytest.fixture(autouse=True)
def quiet_compiler(monkeypatch):
    for name, value in {**ENVIRONMENT, "TPU_LOG_DIR": "disabled"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.sweep
@pytest.mark.parametrize(("pod", "strategy"), PODS)
def test_compiles_for_a_pod(pod, strategy):
    """Tokens, results and what goes with tokens travel, and the gradients of the three."""
    layer, mesh = pods.model_on(pod, SMALL)
    text = pods.lowered(layer, mesh, strategy, None).compile().as_text()
    kinds = collections.Counter(each.kind for each in collectives(text, mesh.size))
    assert text.count("tpu_custom_call") == KERNELS[strategy]
    assert kinds and {kind: count for kind, count in kinds.items() if "to-all" in kind} == EXCHANGES[strategy]


# the tokens of a device, and what the compiler must be told; v5e has no SparseCores, which gathers are left to
OVERLAP = [
    ("v5e:4x4", "ragged", 16, ["xla_tpu_enable_async_ragged_all_to_all"]),
    ("v6e:4x4", "all_to_all", 512, ["xla_tpu_enable_async_all_to_all"]),
    (
        "v6e:2x2", "all_gather", 1024,
        [f"xla_tpu_enable_sparse_core_collective_offload_{kind}" for kind in ("all_gather", "reduce_scatter")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pod", "strategy", "tokens", "options"), sweep(OVERLAP, OVERLAP[:1]))
def test_chunks_travel_while_others_are_multiplied(pod, strategy, tokens, options):
    """By the compiler's order, products run between start and end of a collective, forward and backward."""
    layer, mesh = pods.model_on(pod, dataclasses.replace(SMALL, tokens=tokens))
    compiled = pods.lowered(layer, mesh, strategy, None, chunks=2).compile(dict.fromkeys(options, "true"))
    text = compiled.as_text()
    assert "is_scheduled=true" in text and text.count("tpu_custom_call") == 2 * KERNELS[strategy]
    met = set(itertools.chain(*during(text)))
    assert {"trencadis_gated", "trencadis_rows", "trencadis_gated_pullback"} <= met


def during(text):
    """The names of the kernels that run while each asynchronous collective is under way.

    Some compilers prepare one before its operand is there: it is started by an update of its start.
    """
    under_way, found = {}, []
    for line in text[text.index("ENTRY") :].splitlines():
        name = re.match(r"\s*%([\w.\-]+) = ", line)
        last = re.search(r"-(done|update)\(([^)]*)\)", line)
        before = [each for each in re.findall(r"%([\w.\-]+)", last[2]) if each in under_way] if last else []
        if name and "tpu_custom_call" in line:
            for kernels in under_way.values():
                kernels.append(name[1].split(".")[0])
        for each in before:
            kernels = under_way.pop(each)
            found += [kernels] if last[1] == "done" else []
        if name and re.match(r"(?:ragged-)?(?:all|reduce)-[\w.\-]*(?:start|update)", name[1]):
            under_way[name[1]] = []
    assert found and not under_way
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
def test_the_schedule_is_that_of_the_kernels_in_the_step(strategy):
    """The products and sums of a shard; those that send and receive rows are not among them."""
    layer, mesh = pods.model_on("v6e:4x4", SMALL)
    names = re.findall(
        r"%(trencadis_\w+)[\w.]* = [^\n]*tpu_custom_call",
        (pods.lowered(layer, mesh, strategy, None).compile().as_text()),
    )
    found = pods.scheduled(layer, Pod.named("v6e:4x4"), strategy, None)
    kernels = collections.Counter(kernel.name.split(".")[0] for kernel in found.kernels)
    assert kernels <= collections.Counter(names) and kernels.total() == 10
    assert not any(kernel.warnings for kernel in found.kernels)
    times = step_times(
        Pod.named("v6e:4x4"), strategy, tokens=layer.tokens, k=layer.k, d=layer.d, f=layer.f, local=layer.experts // 16
    )
    assert found.seconds > times.products


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
