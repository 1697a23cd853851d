"""Which GPUs are Hopper, and what they have."""

import pytest

from trencadis.core.devices import CARDS, Card, card_for
from trencadis.core.target import Target

pytestmark = pytest.mark.core


def cuda(kind, cores=None):
    return Target(platform="cuda", kind=kind, cores=cores)


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_a_card_is_found_by_its_kind(card):
    assert card_for(cuda(card.kind)) == card
    assert card.shared == 232448 and card.cores == 132  # of the Hopper tuning guide
    assert hash(card) == hash(card_for(cuda(card.kind)))


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA H20",
     "NVIDIA GH200 480GB", "NVIDIA H200 NVL"],
)  # fmt: skip
def test_trade_names_of_hopper(kind):
    card = card_for(cuda(kind))
    assert card is not None and card.kind == kind and card.cores == 132


@pytest.mark.parametrize(
    "kind",
    [None, "", "NVIDIA A100-SXM4-40GB", "NVIDIA B200", "NVIDIA GB200", "NVIDIA L40S", "Tesla T4", "NVIDIA H2000",
     "NVIDIA RTX H", "NVIDIA GeForce RTX 4090", "NVIDIA H1000", "NVIDIA B300"],
)  # fmt: skip
def test_others(kind):
    assert card_for(cuda(kind)) is None


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms(platform):
    assert card_for(Target(platform=platform, kind="NVIDIA H200")) is None


def test_the_device_knows_its_cores():
    assert card_for(cuda("NVIDIA H100 PCIe", 114)) == Card(kind="NVIDIA H100 PCIe", cores=114)
    assert card_for(cuda("NVIDIA H200", 60)) == Card(kind="NVIDIA H200", cores=60)
    assert CARDS["h200"].cores == 132


def test_a_card_cannot_be_changed():
    with pytest.raises(AttributeError):
        CARDS["h200"].cores = 0
