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
    b11: bool = True  # its float8 with three bits of mantissa is float8_e4m3b11fnuz, and not float8_e4m3fn
    float4: bool = False  # the vector units convert float4_e2m1fn
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


MXU_8BIT = ("int8", "float8_e4m3fn", "float8_e5m2")

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
        mxu_8bit_dtypes=MXU_8BIT, vmatmul_cycles=_vmatmul_cycles(16, 8, 32), vpop_latency=123, vpop_interval=8, vpops=2,
        dma_in=1130, dma_out=436,
    ),
    "v5p": Chip(
        name="v5p", kind="TPU v5", aliases=("TPU v5p",), topology="v5p:2x2x1",
        hbm=2765e9, peak_bf16=459e12 / 2, vmem=64 * MIB, cores=2, mxus=4, clock=1.751e9,
        mxu_8bit_dtypes=MXU_8BIT, vmatmul_cycles=_vmatmul_cycles(16, 8, 32), vpop_latency=123, vpop_interval=8, vpops=2,
        dma_in=672, dma_out=630,
    ),
    "v6e": Chip(
        name="v6e", kind="TPU v6 lite", aliases=("TPU v6e",), topology="v6e:2x2",
        hbm=1640e9, peak_bf16=918e12, vmem=128 * MIB, cores=1, mxus=2, clock=1.751e9,
        mxu_8bit_dtypes=MXU_8BIT, vmatmul_cycles=_vmatmul_cycles(8, 4, 16), vpop_latency=192, vpop_interval=2, vpops=4,
        dma_in=545, dma_out=453,
    ),
    "v7x": Chip(
        name="v7x", kind="TPU7x", aliases=("TPU v7x", "TPU v7"), topology="tpu7x:2x2x1",
        hbm=7380e9 / 2, peak_bf16=2307e12 / 2, vmem=64 * MIB, cores=1, mxus=2, clock=2.2e9,
        mxu_8bit_dtypes=("float8_e4m3fn", "float8_e5m2"), b11=False, float4=True,
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
    """The figures of one GPU model that kernels are planned by.

    Clocks are such that `peak_bf16` is the dense rate that the maker publishes, and are not always published ones.
    """

    kind: str  # JAX's device_kind, e.g. "NVIDIA H200"
    cores: int  # streaming multiprocessors (SMs), or compute units
    arch: str = "9.0"  # compute capability, or "gfx942"
    platform: str = "cuda"
    shared: int = 227 << 10  # bytes of shared memory that one thread block can use
    clock: float = 1.83e9  # cycles per second while tensor cores are busy
    mma_rate: int = 4096  # FLOP of an SM per cycle in bfloat16, with float32 sums; a multiply-add counts as two
    hbm: float = 3.35e12  # memory bandwidth, bytes per second
    float8: bool = True  # the tensor cores multiply float8_e4m3fn and float8_e5m2

    @property
    def units(self) -> str:
        """What its maker calls the cores: "SMs", or "CUs" of an AMD GPU."""
        return "CUs" if self.platform == "rocm" else "SMs"

    @property
    def hopper(self) -> bool:
        """Whether this is a Hopper GPU, which the Mosaic kernels are for."""
        return self.arch == "9.0"

    @property
    def tma(self) -> bool:
        """Whether kernels use its tensor memory accelerator, and tensor cores that read shared memory."""
        return self.arch.split(".")[0] in ("9", "10")

    @property
    def tensor_cores(self) -> bool:
        """Whether the tensor cores multiply bfloat16, as those of NVIDIA do since Ampere, and all of CDNA."""
        return not self.arch.startswith(("3.", "5.", "6.", "7."))

    @property
    def peak_bf16(self) -> float:
        """FLOP per second in bfloat16."""
        return self.cores * self.clock * self.mma_rate


def _ampere(kind: str, cores: int, **figures: Any) -> Card:
    """A card before Hopper, or a consumer one: with 99 KiB of shared memory for a thread block, unless it says more."""
    return Card(**{"kind": kind, "cores": cores, "arch": "8.6", "shared": 99 << 10, "float8": False, **figures})


CARDS: dict[str, Card] = {
    "a100": _ampere(
        "NVIDIA A100-SXM4-80GB", 108, arch="8.0", shared=163 << 10, clock=1.41e9, mma_rate=2048, hbm=2.04e12
    ),
    "a10": _ampere("NVIDIA A10", 72, clock=1.695e9, mma_rate=1024, hbm=0.6e12),
    "rtx3090": _ampere("NVIDIA GeForce RTX 3090", 82, clock=1.695e9, mma_rate=512, hbm=0.936e12),
    "l4": _ampere("NVIDIA L4", 58, arch="8.9", clock=2.04e9, mma_rate=1024, hbm=0.3e12, float8=True),
    "l40s": _ampere("NVIDIA L40S", 142, arch="8.9", clock=2.52e9, mma_rate=1024, hbm=0.864e12, float8=True),
    "rtx4090": _ampere(
        "NVIDIA GeForce RTX 4090", 128, arch="8.9", clock=2.52e9, mma_rate=512, hbm=1.008e12, float8=True
    ),
    "h100": Card(kind="NVIDIA H100 80GB HBM3", cores=132),
    "h200": Card(kind="NVIDIA H200", cores=132, hbm=4.8e12),
    "h20": Card(kind="NVIDIA H20", cores=78, clock=1.853e9, mma_rate=1024, hbm=4.0e12),
    "b200": Card(kind="NVIDIA B200", cores=148, arch="10.0", clock=1.856e9, mma_rate=8192, hbm=7.7e12),
    "gb200": Card(kind="NVIDIA GB200", cores=152, arch="10.0", clock=2.008e9, mma_rate=8192, hbm=8e12),
    "rtx5090": _ampere(
        "NVIDIA GeForce RTX 5090", 170, arch="12.0", clock=2.407e9, mma_rate=512, hbm=1.79e12, float8=True
    ),
    # CDNA 3 multiplies only its own variants of float8 (fnuz)
    "mi300x": Card(
        kind="AMD Instinct MI300X", cores=304, arch="gfx942", platform="rocm", shared=64 << 10, clock=2.1e9,
        mma_rate=2048, hbm=5.3e12, float8=False,
    ),
    "mi355x": Card(
        kind="AMD Instinct MI355X", cores=256, arch="gfx950", platform="rocm", shared=160 << 10, clock=2.4e9,
        mma_rate=4096, hbm=8e12,
    ),
}  # fmt: skip

# other product names under which a model, or one that is like it, is sold
_NAMES = {
    "h100": r"\bG?H(?:100|800)\b", "h200": r"\bG?H200\b", "h20": r"\bH20\b", "a100": r"\bA(?:100|800)\b",
    "a10": r"\bA10G?\b", "l40s": r"\bL40S?\b", "b200": r"\bB[23]00\b", "gb200": r"\bGB[23]00\b",
    "mi300x": r"\bMI3(?:00|08|25)[AX]\b", "mi355x": r"\bMI35[05]X\b",
}  # fmt: skip


def card_for(target: Target) -> Card | None:
    """The figures of a target that is a GPU: of its model, or of one with its compute capability; None of any other.

    >>> card_for(Target(platform="cuda", kind="NVIDIA H200", cores=132)).cores
    132
    >>> card_for(Target(platform="cuda", kind="NVIDIA RTX 6000 Ada", arch="8.9")).arch
    '8.9'
    """
    card = _model(target) or _relative(target)
    if card is None:
        return None
    card = dataclasses.replace(card, kind=target.kind or card.kind)
    return card if target.cores is None else dataclasses.replace(card, cores=target.cores)


def _model(target: Target) -> Card | None:
    """The model that a target names; one of another architecture than the target's own is not it."""
    for name, card in CARDS.items():
        words = _NAMES.get(name, rf"\b{re.escape(card.kind.removeprefix('NVIDIA '))}\b")
        if target.platform == card.platform and target.kind is not None and re.search(words, target.kind):
            return card if target.arch in (None, card.arch) else None
    return None


def _relative(target: Target) -> Card | None:
    """A card like a target whose model is not known: the first with its architecture, or with an older one."""
    if target.arch is None or target.platform not in ("cuda", "rocm"):
        return None
    arch, platform = target.arch.split(":")[0], target.platform  # ROCm appends features, as in "gfx942:sramecc+"
    cards = [card for card in CARDS.values() if card.platform == platform]
    if platform == "rocm":
        return next((card for card in cards if card.arch == arch), None)
    older = [card for card in cards if _number(card.arch) <= _number(arch)]
    if not older:  # before Ampere
        return dataclasses.replace(CARDS["a10"], arch=arch)
    best = max(older, key=lambda card: _number(card.arch))
    return dataclasses.replace(best, arch=arch)


def _number(arch: str) -> tuple[int, ...]:
    """A compute capability, to be compared."""
    return tuple(map(int, arch.split(".")))


def _first_device(platform: str | None) -> jax.Device:
    try:
        return jax.devices(platform)[0]
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS names one that is not there
        raise ValueError(
            f"target: want the name of one, since JAX finds no devices ({type(error).__name__}: {error})"
        ) from None


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
        target = _first_device(default) if default is None or isinstance(default, str) else default
    if isinstance(target, Target):
        return target
    if isinstance(target, str) and target in PLATFORMS:
        return Target(platform=target)
    if isinstance(target, str) and target in CHIPS:
        return Target(platform="tpu", kind=CHIPS[target].kind)
    if isinstance(target, str) and target in CARDS:
        card = CARDS[target]
        return Target(platform=card.platform, kind=card.kind, cores=card.cores)
    if isinstance(target, jax.Device):
        return Target.of(target)
    known = ", ".join(map(repr, (*PLATFORMS, *CHIPS, *CARDS)))
    raise ValueError(f"target: want a Target, a device, or one of {known}; got {target!r}")
