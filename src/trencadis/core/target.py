"""The machine a problem is compiled for. Known at lowering; never guessed from the first device of the process."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A platform as JAX names it, and the kind of device where it is known."""

    platform: str  # "cpu", "cuda", "rocm", "tpu"
    kind: str | None = None  # e.g. "NVIDIA H200", "TPU v5 lite"
    cores: int | None = None  # multiprocessors of a GPU
    partitioned: bool = False  # whether XLA will split the program over several devices by itself

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """The target a device is.

        >>> Target.of(jax.devices("cpu")[0]).platform
        'cpu'
        """
        platform, cores = device.platform, None
        if platform == "gpu":
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
            cores = getattr(device, "core_count", None)
        return cls(platform=platform, kind=device.device_kind, cores=cores)

    def multiplies(self, dtype: DTypeLike) -> bool:
        """Whether the machine has products of this narrow float dtype, summed in float32, that beat converting it.

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
    """Whether this machine's CPU has bfloat16 dot products; XLA:CPU compiles for the machine it runs on."""
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
