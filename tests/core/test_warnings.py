"""`PerformanceWarning`: a call on an accelerator that misses its kernel says so when it is lowered, and says why."""

import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trencadis as tr
from trencadis.core.devices import CARDS, CHIPS
from trencadis.core.jax_compat import abstract_device

pytestmark = pytest.mark.core

DEVICES = {
    "v6e": (CHIPS["v6e"].kind, 1, "tpu"),
    "h200": (CARDS["h200"].kind, 132, "cuda"),
    "unknown": ("NVIDIA X1", 108, "cuda"),
}


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(device, fn=tr.grouped_matmul, dtype=jnp.bfloat16, **options):
    """Lower a small call for a device that is not here."""
    kind, cores, platform = DEVICES[device]
    args = struct(64, 128, dtype=dtype), struct(4, 128, 128, dtype=dtype), struct(4, dtype=jnp.int32)
    with abstract_device(kind, cores, platform=platform):
        return jax.jit(lambda *xs: fn(*xs, **options)).trace(*args).lower(lowering_platforms=(platform,))


def blocks(x, w, s):
    quantized = tr.quant.quantize(w, "int8", (1, 24, 1))
    return tr.grouped_matmul(x, quantized, s)


def ragged(x, w, s):
    a = tr.GroupedTensor.ragged_rows(x, s)
    b = tr.GroupedTensor.ragged_cols(w.reshape(128, -1), s)
    return tr.grouped_gemm(
        a, b, contracting_dims=((1,), (0,)), out=tr.GroupedTensor.fully_ragged(jnp.zeros(64 * 64, x.dtype), s, s)
    ).data


@pytest.mark.parametrize(
    ("device", "call", "reason"),
    [
        ("unknown", {}, r"the triton backend knows neither cuda \(NVIDIA X1\) nor its compute capability"),
        (
            "v6e",
            {"dtype": jnp.float8_e4m3b11fnuz},
            "lhs is float8_e4m3b11fnuz; kernels take .*; cast it to one of these",
        ),
        (
            "v6e",
            {"dtype": jnp.float32, "precision": jax.lax.DotAlgorithmPreset.F32_F32_F32},
            "precision is F32_F32_F32; the tpu backend has DEFAULT, HIGH and HIGHEST",
        ),
        ("h200", {"dtype": jnp.int16, "preferred_element_type": jnp.int32}, "lhs is int16; kernels take .*"),
        ("h200", {"fn": blocks}, "one kernel for each block of 24 along k"),
        ("v6e", {"fn": blocks}, "one kernel for each block of 24 along k"),
    ],
)
def test_each_reason_is_said(device, call, reason):
    with pytest.warns(tr.PerformanceWarning, match=reason) as seen:
        lower(device, **call)
    assert len({str(each.message) for each in seen}) == 1
    assert "trencadis.why(fn, *args)" in str(seen[0].message)


def test_nothing_is_said_on_the_fast_path_nor_of_what_was_asked_for():
    for device in ("v6e", "h200"):
        assert lower(device).as_text().count("custom_call") >= 1  # a kernel, and no warning, which would be an error
        assert "stablehlo.while" in lower(device, backend="xla").as_text()
    jax.jit(tr.grouped_matmul)(jnp.ones((4, 2), jnp.float16), jnp.ones((1, 2, 2)), jnp.array([4]))  # CPU has no kernels
    with abstract_device(*DEVICES["h200"][:2], platform="cuda"):  # nothing to multiply, nothing lost
        args = struct(0, 128), struct(4, 128, 128), struct(4, dtype=jnp.int32)
        jax.jit(tr.grouped_matmul).trace(*args).lower(lowering_platforms=("cuda",))


def test_the_usual_filters_silence_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tr.PerformanceWarning)
        assert "stablehlo.while" in lower("unknown").as_text()


def test_once_for_each_reason():
    """Four layers that miss the kernel for one reason say it once, under Python's default filter."""

    def layers(x, w, s):
        for _ in range(4):
            x = tr.grouped_matmul(x, w, s, x.dtype)
        return x

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        lower("unknown", fn=layers)
    assert len(seen) == 1
    assert seen[0].filename == __file__  # and not where it is issued, in the library


def spread(axis):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis,), devices=jax.devices()[:4])
    args = [jnp.ones((64, 128), jnp.bfloat16), jnp.ones((4, 128, 128), jnp.bfloat16), jnp.full((4,), 16)]
    return mesh, args, [jax.device_put(x, NamedSharding(mesh, P(*("d",) * (i == 1)))) for i, x in enumerate(args)]


def test_why_says_what_a_mesh_does():
    """Kernels on explicit axes; on automatic ones, too, where XLA asks a rule how to divide a product."""
    mesh, args, given = spread(AxisType.Explicit)
    for target, backend in (("v6e", "tpu"), ("h200", "gpu")):
        answer = tr.why(tr.grouped_matmul, *given, target=target)
        assert [each.plan.backend for each in answer.passes] == [backend] * 3
        assert answer.problem.local_groups == 1 and "one device of 4 computes this part, under shard_map" in str(answer)
        assert "exchange     forward: all-reduce of float32[64,128] over d: 32,768 bytes" in str(answer)
        assert "exchange     gradient: all-reduce of bfloat16[64,128] over d: 16,384 bytes" in str(answer)
    names = [name for name, _ in tr.why(*given, target="v6e").exchanges]
    assert names == ["forward", "d lhs"]
    inside = jax.shard_map(tr.grouped_matmul, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"d"})
    assert tr.why(inside, *args, target="h200").passes[0].plan.backend == "gpu"

    _, _, given = spread(AxisType.Auto)
    answer = tr.why(*given, target="h200")
    assert answer.passes[0].plan.backend == "gpu" and "XLA divides it over the mesh by its sharding rule" in str(answer)
    assert [str(each) for _, each in answer.exchanges] == ["all-reduce of float32[64,128] over d: 32,768 bytes"]


def test_automatic_axes_drop_a_tpu_kernel_aloud():
    """XLA cannot partition a kernel for TPUs: the warning says what it gathers, and what to do."""
    mesh, _, given = spread(AxisType.Auto)
    answer = tr.why(tr.grouped_matmul, *given, target="v6e")
    assert [each.plan.backend for each in answer.passes] == ["xla"] * 3
    assert "gathers rhs if sharded, 131,072 bytes on each device; wrap the call in jax.shard_map" in str(answer)
    with (
        tr.target("v6e"),
        pytest.warns(
            tr.PerformanceWarning,
            match=r"131,072 bytes.*cannot partition a kernel over devices; wrap the call in.*trencadis\.sharded",
        ),
    ):
        jax.jit(tr.grouped_matmul).trace(*given).lower(lowering_platforms=("tpu",))
    call = tr.sharded(mesh, P(), P("d"), P())(tr.grouped_matmul)
    with tr.target("v6e"):
        lowered = jax.jit(call).trace(*given).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.once
def test_groups_that_differ_in_several_dimensions():
    text = lower("v6e", fn=ragged).as_text()
    assert text.count("tpu_custom_call") == 5  # one kernel; for other groups two copies, products and results


def test_a_missing_package_is_said_aloud():
    """Without Triton and what Pallas for GPUs imports, a call for an H200 says what to install."""
    program = """
        import sys, warnings
        for name in ("absl", "jax.experimental.pallas.mosaic_gpu", "triton"):
            sys.modules[name] = None  # importing it fails
        import jax, jax.numpy as jnp
        import trencadis as tr
        from trencadis.core.jax_compat import abstract_device
        x, w = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
        with abstract_device("NVIDIA H200", 132, platform="cuda"), warnings.catch_warnings(record=True) as seen:
            jax.jit(tr.grouped_matmul).trace(x, w, jax.ShapeDtypeStruct((4,), jnp.int32)).lower(
                lowering_platforms=("cuda",)
            )
        print(*(f"{each.category.__name__}: {each.message}" for each in seen), sep="\\n")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        "PerformanceWarning: a grouped product runs as XLA loops instead of a kernel: Pallas for GPUs does not import"
        in (done.stdout)
    )
    assert "pip install 'trencadis[cuda]'" in done.stdout
