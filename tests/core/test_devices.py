"""The tables of TPUs and GPUs are consistent with themselves, with JAX's, and with the names of devices."""

import pytest
from jax.experimental.pallas import tpu as pltpu

from trencadis.core.devices import CARDS, CHIPS, Card, card_for, chip_of
from trencadis.core.jax_compat import abstract_device
from trencadis.core.target import Target

pytestmark = pytest.mark.core


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_a_chip_is_found_by_every_name(chip):
    for name in (chip.name, chip.kind, *chip.aliases):
        assert chip_of(name) is chip
    assert chip_of(chip.name).topology.split(":")[0].removeprefix("tpu") in (chip.name, "7x")
    assert hash(chip) == hash(chip_of(chip.kind))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_figures_agree_with_those_of_jax(chip):
    with abstract_device(chip.kind, chip.cores):
        info = pltpu.get_tpu_info()
    assert info.vmem_capacity_bytes == chip.vmem
    assert info.num_mxus == chip.mxus
    cores = chip.cores if chip.name == "v5p" else 1  # JAX gives the share of a core, but one core alone has all of it
    assert chip.hbm == pytest.approx(info.mem_bw_bytes_per_second * cores, rel=0.13)
    assert chip.peak_bf16 == pytest.approx(info.bf16_ops_per_second, rel=0.05)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_the_clock_reaches_the_peak(chip):
    """An MXU has 128 x 128 cells and takes a row per cycle; since v6e it has 256 x 256 and takes two."""
    side, rows = (256, 2) if chip.mxus == 2 else (128, 1)
    assert 2 * rows * side * side * chip.mxus * chip.clock == pytest.approx(chip.peak_bf16, rel=0.03)


def test_the_error_for_an_unknown_name_lists_all():
    with pytest.raises(ValueError, match=r"v4 \(TPU v4\), v5e \(TPU v5 lite\).*got 'v3'"):
        chip_of("v3")


def test_a_chip_cannot_be_changed():
    with pytest.raises(AttributeError):
        CHIPS["v6e"].vmem = 0
    with pytest.raises(TypeError):
        CHIPS["v6e"].vmatmul_cycles["bf16"] = 0


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


def cuda(kind, cores=None):
    return Target(platform="cuda", kind=kind, cores=cores)


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_a_card_is_found_by_its_kind(card):
    target = Target(platform=card.platform, kind=card.kind)
    assert card_for(target) == card and card.tensor_cores
    assert hash(card) == hash(card_for(target))
    if card.hopper:  # from the Hopper tuning guide
        assert card.shared == 232448 and card.cores in (132, 78)


@pytest.mark.parametrize(
    ("name", "tera"),
    [("a100", 312), ("a10", 125), ("l4", 121), ("l40s", 362), ("rtx3090", 71), ("rtx4090", 165), ("rtx5090", 209.5),
     ("h100", 989), ("h200", 989), ("h20", 148), ("b200", 2250), ("gb200", 2500), ("mi300x", 1307), ("mi355x", 2516)],
)  # fmt: skip
def test_figures_reach_the_peak_of_the_data_sheet(name, tera):
    assert CARDS[name].peak_bf16 / 1e12 == pytest.approx(tera, rel=0.02)


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA H20",
     "NVIDIA GH200 480GB", "NVIDIA H200 NVL"],
)  # fmt: skip
def test_product_names_of_hopper(kind):
    card = card_for(cuda(kind))
    assert card is not None and card.kind == kind and card.hopper


@pytest.mark.parametrize(
    ("kind", "arch"),
    [("NVIDIA A100-SXM4-40GB", "8.0"), ("NVIDIA B200", "10.0"), ("NVIDIA GB200", "10.0"), ("NVIDIA L40S", "8.9"),
     ("NVIDIA GeForce RTX 4090", "8.9"), ("NVIDIA B300", "10.0"), ("NVIDIA A10G", "8.6")],
)  # fmt: skip
def test_other_gpus_are_not_hopper(kind, arch):
    card = card_for(cuda(kind))
    assert card is not None and not card.hopper and card.arch == arch


@pytest.mark.parametrize("kind", [None, "", "Tesla T4", "NVIDIA H2000", "NVIDIA RTX H", "NVIDIA H1000"])
def test_a_gpu_of_which_nothing_is_known(kind):
    assert card_for(cuda(kind)) is None


def test_a_compute_capability_says_more_than_no_name():
    assert card_for(Target(platform="cuda", kind="NVIDIA RTX 6000 Ada", cores=142, arch="8.9")).cores == 142
    assert card_for(Target(platform="cuda", kind="NVIDIA B300", arch="10.3")).arch == "10.3"
    assert not card_for(Target(platform="cuda", kind="Tesla T4", arch="7.5")).tensor_cores
    assert card_for(Target(platform="rocm", kind="AMD Radeon", arch="gfx1100")) is None


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_are_not_hopper(platform):
    assert card_for(Target(platform=platform, kind="NVIDIA H200")) is None


def test_the_number_of_sms_is_that_of_the_target():
    assert card_for(cuda("NVIDIA H100 PCIe", 114)) == Card(kind="NVIDIA H100 PCIe", cores=114)
    assert card_for(cuda("NVIDIA H200", 60)).cores == 60
    assert CARDS["h200"].cores == 132


def test_a_card_cannot_be_changed():
    with pytest.raises(AttributeError):
        CARDS["h200"].cores = 0
