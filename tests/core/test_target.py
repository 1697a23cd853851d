"""The platform, kind and core count of a target are those of its device."""

import jax
import pytest

from trencadis.core.target import Target

pytestmark = pytest.mark.core


class Device:
    def __init__(self, platform, kind, version="", cores=None):
        self.platform, self.device_kind = platform, kind
        if cores is not None:
            self.core_count = cores
        self.client = type("Client", (), {"platform_version": version})


def test_of_devices():
    assert Target.of(jax.devices("cpu")[0]) == Target(platform="cpu", kind="cpu")
    assert str(Target.of(jax.devices("cpu")[0])) == "cpu"
    assert str(Target.of(Device("tpu", "TPU v5 lite"))) == "tpu (TPU v5 lite)"
    assert Target.of(Device("gpu", "NVIDIA H200", "cuda 12")).platform == "cuda"
    assert Target.of(Device("gpu", "MI300", "ROCM 6")).platform == "rocm"


def test_cores_of_a_gpu():
    """The number of cores comes from the device, and is not part of the target's name."""
    assert Target.of(Device("gpu", "NVIDIA H200", "cuda 12", cores=132)).cores == 132
    assert Target.of(Device("gpu", "NVIDIA H200", "cuda 12")).cores is None
    assert Target.of(jax.devices("cpu")[0]).cores is None
    assert str(Target(platform="cuda", kind="NVIDIA H200", cores=132)) == "cuda (NVIDIA H200)"
    assert Target(platform="cuda", cores=132) != Target(platform="cuda", cores=114)
