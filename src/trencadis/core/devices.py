"""The TPU generations in figures: what a kernel has to work with, and what its instructions cost.

A figure is of one TensorCore, as JAX hands it out as a device: a v4 or v7x chip is two devices, each with its half of
the chip's memory bandwidth. A v5p chip is one device of two cores; a kernel that does not split its grid over them
runs on one, which then has the memory to itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from trencadis.core.target import Target

MIB = 1 << 20
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation of TPU; times are in cycles of `clock`."""

    name: str  # the generation, e.g. "v5e"
    kind: str  # what JAX calls the device, e.g. "TPU v5 lite"
    also: tuple[str, ...] = ()  # other kinds under which JAX knows it
    topology: str  # the smallest slice that the compiler knows by name
    # From the Cloud TPU pages and from JAX's own table (jax.experimental.pallas.tpu.get_tpu_info).
    hbm: float  # bytes a second of memory bandwidth
    peak_bf16: float  # multiply and add counted apart, a second
    vmem: int  # bytes
    cores: int  # TensorCores in the device
    mxus: int
    narrow: tuple[str, ...] = ()  # operands of 8 bits that the MXU multiplies, or loads as bfloat16 beside one
    blind: str | None = "float8_e4m3fn"  # that of them which it loads as a float8 without NaN
    # The clock at which the fastest schedule that the compiler allows reaches `peak_bf16`; it comes out as published.
    clock: float
    # From the static profile that libtpu writes of its own schedules (--xla_jf_dump_static_llo_profile_to).
    mm: Mapping[str, int] = dataclasses.field(hash=False)  # one vmatmul holds its MXU, by type of operand
    push: int = 4  # one vmatpush holds the way into its MXU
    pop: int  # from a vmatmul to the first part of its result
    pop_gap: int  # from one part to the next
    pops: int  # parts of a result where a block does not tell
    dma_in: int  # latency of a copy from HBM, before its bytes count
    dma_out: int  # and of one to HBM
    granule: int = 32  # bytes in which copies are counted: what the schedule of a copy of known size shows
    # Bundles after a branch that run whether it is taken or not: from the schedules themselves.
    slots: int = 4

    @property
    def kinds(self) -> tuple[str, ...]:
        """All names under which JAX knows the device."""
        return (self.kind, *self.also)


def _mm(bf16: int, f32: int, f8: int) -> Mapping[str, int]:
    """A product of narrow integers takes as long as one of bfloat16, and has more in it."""
    return MappingProxyType({"bf16": bf16, "f32": f32, "s8": bf16, "u8": bf16, "f8": f8, "s4": bf16})


# The DMA latencies of v4 and v7x are round figures near v5p's.
CHIPS: dict[str, Chip] = {
    "v4": Chip(
        name="v4", kind="TPU v4", topology="v4:2x2x1",
        hbm=1228e9 / 2, peak_bf16=275e12 / 2, vmem=16 * MIB, cores=1, mxus=4, clock=1.05e9,
        mm=_mm(8, 8, 16), pop=115, pop_gap=8, pops=1, dma_in=700, dma_out=600, granule=512,
    ),
    "v5e": Chip(
        name="v5e", kind="TPU v5 lite", also=("TPU v5e",), topology="v5e:2x2",
        hbm=819e9, peak_bf16=197e12, vmem=128 * MIB, cores=1, mxus=4, clock=1.503e9,
        narrow=("int8", "float8_e4m3fn", "float8_e5m2"),
        mm=_mm(16, 8, 32), pop=123, pop_gap=8, pops=2, dma_in=1130, dma_out=436,
    ),
    "v5p": Chip(
        name="v5p", kind="TPU v5", also=("TPU v5p",), topology="v5p:2x2x1",
        hbm=2765e9, peak_bf16=459e12 / 2, vmem=64 * MIB, cores=2, mxus=4, clock=1.751e9,
        narrow=("int8", "float8_e4m3fn", "float8_e5m2"),
        mm=_mm(16, 8, 32), pop=123, pop_gap=8, pops=2, dma_in=672, dma_out=630,
    ),
    "v6e": Chip(
        name="v6e", kind="TPU v6 lite", also=("TPU v6e",), topology="v6e:2x2",
        hbm=1640e9, peak_bf16=918e12, vmem=128 * MIB, cores=1, mxus=2, clock=1.751e9,
        narrow=("int8", "float8_e4m3fn", "float8_e5m2"),
        mm=_mm(8, 4, 16), pop=192, pop_gap=2, pops=4, dma_in=545, dma_out=453,
    ),
    "v7x": Chip(
        name="v7x", kind="TPU7x", also=("TPU v7x", "TPU v7"), topology="tpu7x:2x2x1",
        hbm=7380e9 / 2, peak_bf16=2307e12 / 2, vmem=64 * MIB, cores=1, mxus=2, clock=2.2e9,
        narrow=("float8_e4m3fn", "float8_e5m2"), blind=None,
        mm=_mm(8, 4, 8), pop=211, pop_gap=1, pops=4, dma_in=700, dma_out=600, slots=6,
    ),
}  # fmt: skip


def chip_of(name: str) -> Chip:
    """The chip of that generation ("v6e"), or of that kind of device ("TPU v6 lite").

    >>> chip_of("v6e").vmem >> 20, chip_of("TPU v6 lite").name
    (128, 'v6e')
    """
    for chip in CHIPS.values():
        if name in (chip.name, chip.kind, *chip.also):
            return chip
    known = ", ".join(f"{chip.name} ({chip.kind})" for chip in CHIPS.values())
    raise ValueError(f"generation: want one of {known}; got {name!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU: what a kernel has to work with."""

    kind: str  # what JAX calls the device, e.g. "NVIDIA H200"
    cores: int  # streaming multiprocessors
    shared: int = 227 << 10  # bytes of shared memory that one thread block can have


CARDS: dict[str, Card] = {
    "h100": Card(kind="NVIDIA H100 80GB HBM3", cores=132),
    "h200": Card(kind="NVIDIA H200", cores=132),
}

_HOPPER = re.compile(r"\bG?H(?:100|200|800|20)\b")  # compute capability 9.0 under its trade names


def card_for(target: Target) -> Card | None:
    """The Hopper GPU a target is; None if it is another, or if it is not known which.

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
    """Any spelling of a target; None is the device on which JAX runs what names no other.

    >>> print(target_of("tpu"), "|", target_of("v6e"), "|", target_of("h200"))
    tpu | tpu (TPU v6 lite) | cuda (NVIDIA H200)
    """
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
