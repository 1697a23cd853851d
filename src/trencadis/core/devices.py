"""Devices in figures: what TPU generations and GPUs offer a kernel, and what instructions of a TPU cost.

The figures of a TPU are those of one TensorCore, as JAX exposes it as a device. A v4 or v7x chip is two devices, each
with half of the chip's memory bandwidth. A v5p chip is one device with two cores; a kernel that does not split its grid
over them runs on one core, which then has the whole memory bandwidth.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from trencadis.core.jax_compat import current_target
from trencadis.core.target import Target

MIB = 1 << 20
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation of TPU; times are in cycles of `clock`."""

    name: str  # the generation, e.g. "v5e"
    kind: str  # JAX's device_kind, e.g. "TPU v5 lite"
    aliases: tuple[str, ...] = ()  # other kinds under which JAX knows it
    topology: str  # the smallest slice that the compiler knows by name
    # From the Cloud TPU pages and from JAX's own table (jax.experimental.pallas.tpu.get_tpu_info).
    hbm: float  # memory bandwidth, bytes per second
    peak_bf16: float  # bfloat16 FLOP per second; a multiply-add counts as two
    vmem: int  # bytes
    cores: int  # TensorCores in the device
    mxus: int  # MXUs in a TensorCore
    mxu_8bit_dtypes: tuple[str, ...] = ()  # 8-bit dtypes that the MXU multiplies, or upcasts next to a bfloat16 operand
    no_nan_dtype: str | None = "float8_e4m3fn"  # 8-bit dtype whose NaN the MXU drops: it loads it as a format without
    # The clock at which the fastest schedule of the compiler reaches `peak_bf16`; it agrees with published ones.
    clock: float
    # From the static profile that libtpu writes of its own schedules (--xla_jf_dump_static_llo_profile_to).
    vmatmul_cycles: Mapping[str, int] = dataclasses.field(hash=False)  # a vmatmul occupies its MXU, by operand type
    vmatpush_cycles: int = 4  # a vmatpush (load of weights) occupies the path into its MXU
    vpop_latency: int  # from a vmatmul to the vpop of the first part of its result
    vpop_interval: int  # from the vpop of one part of a result to the next
    vpops: int  # parts of a result, for a basic block that does not show it
    dma_in: int  # latency of a copy from HBM, before its first byte
    dma_out: int  # latency of a copy to HBM
    dma_granule: int = 32  # bytes in which the schedule counts the size of a copy
    # Read off the schedules: bundles after a branch that run whether it is taken or not.
    delay_slots: int = 4

    @property
    def kinds(self) -> tuple[str, ...]:
        """All device kinds under which JAX knows this generation."""
        return (self.kind, *self.aliases)


def _vmatmul_cycles(bf16: int, f32: int, f8: int) -> Mapping[str, int]:
    """Cycles by operand type; a vmatmul of integers takes as long as one of bfloat16, but holds more numbers."""
    return MappingProxyType({"bf16": bf16, "f32": f32, "s8": bf16, "u8": bf16, "f8": f8, "s4": bf16})


# The DMA latencies of v4 and v7x are round figures near v5p's.
CHIPS: dict[str, Chip] = {
    "v4": Chip(
        name="v4", kind="TPU v4", topology="v4:2x2x1",
        hbm=1228e9 / 2, peak_bf16=275e12 / 2, vmem=16 * MIB, cores=1, mxus=4, clock=1.05e9,
        vmatmul_cycles=_vmatmul_cycles(8, 8, 16), vpop_latency=115, vpop_interval=8, vpops=1,
        dma_in=700, dma_out=600, dma_granule=512,
    ),
    "v5e": Chip(
        name="v5e", kind="TPU v5 lite", aliases=("TPU v5e",), topology="v5e:2x2",
        hbm=819e9, peak_bf16=197e12, vmem=128 * MIB, cores=1, mxus=4, clock=1.503e9,
        mxu_8bit_dtypes=("int8", "float8_e4m3fn", "float8_e5m2"),
        vmatmul_cycles=_vmatmul_cycles(16, 8, 32), vpop_latency=123, vpop_interval=8, vpops=2,
        dma_in=1130, dma_out=436,
    ),
    "v5p": Chip(
        name="v5p", kind="TPU v5", aliases=("TPU v5p",), topology="v5p:2x2x1",
        hbm=2765e9, peak_bf16=459e12 / 2, vmem=64 * MIB, cores=2, mxus=4, clock=1.751e9,
        mxu_8bit_dtypes=("int8", "float8_e4m3fn", "float8_e5m2"),
        vmatmul_cycles=_vmatmul_cycles(16, 8, 32), vpop_latency=123, vpop_interval=8, vpops=2,
        dma_in=672, dma_out=630,
    ),
    "v6e": Chip(
        name="v6e", kind="TPU v6 lite", aliases=("TPU v6e",), topology="v6e:2x2",
        hbm=1640e9, peak_bf16=918e12, vmem=128 * MIB, cores=1, mxus=2, clock=1.751e9,
        mxu_8bit_dtypes=("int8", "float8_e4m3fn", "float8_e5m2"),
        vmatmul_cycles=_vmatmul_cycles(8, 4, 16), vpop_latency=192, vpop_interval=2, vpops=4,
        dma_in=545, dma_out=453,
    ),
    "v7x": Chip(
        name="v7x", kind="TPU7x", aliases=("TPU v7x", "TPU v7"), topology="tpu7x:2x2x1",
        hbm=7380e9 / 2, peak_bf16=2307e12 / 2, vmem=64 * MIB, cores=1, mxus=2, clock=2.2e9,
        mxu_8bit_dtypes=("float8_e4m3fn", "float8_e5m2"), no_nan_dtype=None,
        vmatmul_cycles=_vmatmul_cycles(8, 4, 8), vpop_latency=211, vpop_interval=1, vpops=4,
        dma_in=700, dma_out=600, delay_slots=6,
    ),
}  # fmt: skip


def chip_of(name: str) -> Chip:
    """The chip with this name: a generation ("v6e") or a device kind of JAX ("TPU v6 lite").

    >>> chip_of("v6e").vmem >> 20, chip_of("TPU v6 lite").name
    (128, 'v6e')
    """
    for chip in CHIPS.values():
        if name in (chip.name, chip.kind, *chip.aliases):
            return chip
    known = ", ".join(f"{chip.name} ({chip.kind})" for chip in CHIPS.values())
    raise ValueError(f"generation: want one of {known}; got {name!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The figures of one GPU model that kernels are planned by."""

    kind: str  # JAX's device_kind, e.g. "NVIDIA H200"
    cores: int  # streaming multiprocessors (SMs)
    shared: int = 227 << 10  # bytes of shared memory that one thread block can use


CARDS: dict[str, Card] = {
    "h100": Card(kind="NVIDIA H100 80GB HBM3", cores=132),
    "h200": Card(kind="NVIDIA H200", cores=132),
}

_HOPPER = re.compile(r"\bG?H(?:100|200|800|20)\b")  # product names of compute capability 9.0


def card_for(target: Target) -> Card | None:
    """The figures of a target that is a Hopper GPU; None if it is another device, or of unknown kind.

    >>> card_for(Target(platform="cuda", kind="NVIDIA H200", cores=132)).cores
    132
    >>> card_for(Target(platform="cuda", kind="NVIDIA A100-SXM4-40GB")) is None
    True
    """
    if target.platform != "cuda" or target.kind is None or not _HOPPER.search(target.kind):
        return None
    known = {card.kind: card for card in CARDS.values()}.get(target.kind, Card(kind=target.kind, cores=132))
    return known if target.cores is None else dataclasses.replace(known, cores=target.cores)


def target_of(target: Target | jax.Device | str | None) -> Target:
    """The `Target` that a device, a platform, a TPU generation or a GPU name means.

    None is that of `trencadis.target`, or JAX's default device.

    >>> print(target_of("tpu"), "|", target_of("v6e"), "|", target_of("h200"))
    tpu | tpu (TPU v6 lite) | cuda (NVIDIA H200)
    """
    if target is None:
        target = current_target()
    if target is None:
        config: Any = jax.config
        default = config.jax_default_device  # a device, the name of a platform, or None
        target = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    if isinstance(target, Target):
        return target
    if isinstance(target, str) and target in PLATFORMS:
        return Target(platform=target)
    if isinstance(target, str) and target in CHIPS:
        return Target(platform="tpu", kind=CHIPS[target].kind)
    if isinstance(target, str) and target in CARDS:
        return Target(platform="cuda", kind=CARDS[target].kind, cores=CARDS[target].cores)
    if isinstance(target, jax.Device):
        return Target.of(target)
    known = ", ".join(map(repr, (*PLATFORMS, *CHIPS, *CARDS)))
    raise ValueError(f"target: want a Target, a device, or one of {known}; got {target!r}")
