"""The table of chips is consistent with itself and with JAX's."""

import pytest
from jax.experimental.pallas import tpu as pltpu

from trencadis.core.devices import CHIPS, chip_of
from trencadis.core.jax_compat import abstract_device

pytestmark = pytest.mark.core


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_a_chip_is_found_by_every_name(chip):
    for name in (chip.name, chip.kind, *chip.also):
        assert chip_of(name) is chip
    assert chip_of(chip.name).topology.split(":")[0].removeprefix("tpu") in (chip.name, "7x")
    assert hash(chip) == hash(chip_of(chip.kind))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_figures_agree_with_what_jax_knows(chip):
    with abstract_device(chip.kind, chip.cores):
        info = pltpu.get_tpu_info()
    assert info.vmem_capacity_bytes == chip.vmem
    assert info.num_mxus == chip.mxus
    cores = chip.cores if chip.name == "v5p" else 1  # JAX tells each core's share; one core alone has all of it
    assert chip.hbm == pytest.approx(info.mem_bw_bytes_per_second * cores, rel=0.13)
    assert chip.peak_bf16 == pytest.approx(info.bf16_ops_per_second, rel=0.05)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_the_clock_reaches_the_peak(chip):
    """An MXU is 128 by 128 and takes a row a cycle; since v6e it is 256 by 256 and takes two."""
    side, rows = (256, 2) if chip.mxus == 2 else (128, 1)
    assert 2 * rows * side * side * chip.mxus * chip.clock == pytest.approx(chip.peak_bf16, rel=0.03)


def test_an_unknown_name_gets_the_list():
    with pytest.raises(ValueError, match=r"v4 \(TPU v4\), v5e \(TPU v5 lite\).*got 'v3'"):
        chip_of("v3")


def test_a_chip_cannot_be_changed():
    with pytest.raises(AttributeError):
        CHIPS["v6e"].vmem = 0
    with pytest.raises(TypeError):
        CHIPS["v6e"].mm["bf16"] = 0
