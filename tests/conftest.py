"""Four CPU devices for the sharded tests, and one profile for hypothesis: values vary, shapes do not."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:  # a test runs once: what LLVM would win, it loses
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import hypothesis
import jax
import numpy as np
import pytest

hypothesis.settings.register_profile(
    "laws", deadline=None, max_examples=12, derandomize=True, print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("laws")


@pytest.fixture(params=["xla", "reference"])
def backend(request):
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
