"""Eight CPU devices for the sharded tests, and one profile for hypothesis: values vary, shapes do not."""

import gc
import os
import sys
import threading

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# A test runs once: what LLVM would win, it loses. And the older emitters of fusions take half the time of those that
# users have, which examples run with; a jax that has none of them ignores the option. To test with all that users
# have: XLA_FLAGS=--xla_backend_optimization_level=3.
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    # These two passes take a fifth of the time in which the interpreters' programs, full of loops, are compiled.
    os.environ["XLA_FLAGS"] += " --xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion"

# Native CPU kernels would be what everything runs on, where they are installed: `make test-native` tests with them.
if "TRENCADIS_TEST_NATIVE" not in os.environ:
    sys.modules["trencadis_cpu"] = None

import hypothesis
import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxtyping import install_import_hook

# Types and shapes in the signatures of these modules are checked at every call; the others have few shapes to check.
CHECKED = ["debug", "epilogue", "execute", "schedule", "spans", "split", "unfused"]
install_import_hook([f"trencadis.core.{module}" for module in CHECKED], "beartype.beartype")

hypothesis.settings.register_profile(
    "laws", deadline=None, max_examples=12, derandomize=True, print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("laws")


def reuse_mlir_contexts(times=10):
    """Lower several programs in one MLIR context, as jax does by itself since 0.12; making one takes 5 ms."""
    make, thread = mlir.make_ir_context, threading.local()

    def reused():
        thread.uses = getattr(thread, "uses", 0)
        if thread.uses % times == 0:
            thread.context = make()
        thread.uses += 1
        return thread.context

    build = mlir.build_mlir_module_helper

    def built_apart(*args, **options):
        """A program that XLA asks for while it compiles another, whose context is in use."""
        mlir.make_ir_context = make
        try:
            return build(*args, **options)
        finally:
            mlir.make_ir_context = reused

    mlir.make_ir_context, mlir.build_mlir_module_helper = reused, built_apart


if not hasattr(mlir, "_thread_local_context"):
    reuse_mlir_contexts()


def pytest_collection_finish():
    """What was imported lives to the end, and is not looked through again at every collection of garbage."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


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
