"""The machine a problem is compiled for. Known at lowering; never guessed from the first device of the process."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A platform as JAX names it, and the kind of device where it is known."""

    platform: str  # "cpu", "cuda", "rocm", "tpu"
    kind: str | None = None  # e.g. "NVIDIA H200", "TPU v5 lite"

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """The target a device is.

        >>> Target.of(jax.devices("cpu")[0]).platform
        'cpu'
        """
        platform = device.platform
        if platform == "gpu":
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
        return cls(platform=platform, kind=device.device_kind)

    def __str__(self) -> str:
        return self.platform if self.kind in (None, self.platform) else f"{self.platform} ({self.kind})"
