"""What a target says of itself."""

import jax
import pytest

from trencadis.target import Target

pytestmark = pytest.mark.core


class Device:
    def __init__(self, platform, kind, version=""):
        self.platform, self.device_kind = platform, kind
        self.client = type("Client", (), {"platform_version": version})


def test_of_devices():
    assert Target.of(jax.devices("cpu")[0]) == Target(platform="cpu", kind="cpu")
    assert str(Target.of(jax.devices("cpu")[0])) == "cpu"
    assert str(Target.of(Device("tpu", "TPU v5 lite"))) == "tpu (TPU v5 lite)"
    assert Target.of(Device("gpu", "NVIDIA H200", "cuda 12")).platform == "cuda"
    assert Target.of(Device("gpu", "MI300", "ROCM 6")).platform == "rocm"
