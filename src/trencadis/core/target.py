"""The machine that a problem is compiled for, as known at lowering; never guessed from the first device."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The platform that a program is lowered for, and the kind of device if it is known."""

    platform: str  # "cpu", "cuda", "rocm", "tpu"
    kind: str | None = None  # e.g. "NVIDIA H200", "TPU v5 lite"
    cores: int | None = None  # streaming multiprocessors of a GPU
    arch: str | None = None  # of a GPU: its compute capability, e.g. "9.0", or "gfx942"
    partitioned: bool = False  # True if XLA partitions the program over several devices by itself
    exported: bool = False  # True if the program is exported, and runs in other processes than this

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """The target that a device is.

        >>> Target.of(jax.devices("cpu")[0]).platform
        'cpu'
        """
        platform, cores, arch = device.platform, None, None
        if platform == "gpu":
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
            cores, arch = getattr(device, "core_count", None), getattr(device, "compute_capability", None)
        return cls(platform=platform, kind=device.device_kind, cores=cores, arch=arch)

    def multiplies(self, dtype: DTypeLike) -> bool:
        """True if the machine multiplies this 16-bit float dtype, with float32 sums, faster than after an upcast.

        >>> Target(platform="tpu").multiplies("bfloat16"), Target(platform="cpu").multiplies("float16")
        (True, False)
        """
        dtype = jnp.dtype(dtype)
        if self.platform == "cpu":
            return dtype == jnp.bfloat16 and _host_multiplies_bfloat16()
        return dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))

    def __str__(self) -> str:
        return self.platform if self.kind in (None, self.platform) else f"{self.platform} ({self.kind})"


@functools.cache
def _host_multiplies_bfloat16() -> bool:
    """True if the CPU of this machine has bfloat16 dot products; XLA:CPU compiles for the machine it runs on."""
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
