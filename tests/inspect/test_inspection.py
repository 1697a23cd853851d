"""Laws of the whole: compiled by the real compiler, and run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from sweep import sweep

from trencadis import inspect as tpu
from trencadis.inspect import inspection

from .kernels import array, bf16, copied, copy, first_tiles, led_by_data, matmul, multiplied, visited


# what a newer compiler may change; the rest runs on the default Python alone
@pytest.mark.core
@pytest.mark.parametrize("generation", sweep(tpu.CHIPS, ["v5e"]))
def test_a_copy_moves_its_bytes_and_no_more(generation):
    found = copied(generation)
    (kernel,) = found.kernels
    size = 1024 * 1024 * 4
    assert found.compiled and kernel.warnings == () and found.warnings == ()
    assert (kernel.bytes_in, kernel.bytes_out, kernel.copies) == (size, size, 16)
    assert kernel.vmem_bytes == 128 * 1024 * 4
    assert kernel.seconds >= kernel.dma_seconds >= 2 * size / found.chip.hbm
    assert kernel.mxu_busy == 0 and kernel.hot is None
    assert 0.5 < kernel.dma_wait < 1


@pytest.mark.sweep
def test_a_product_takes_at_least_its_operations():
    found = multiplied()
    (kernel,) = found.kernels
    assert found.seconds == kernel.seconds >= kernel.compute_seconds >= found.flops / found.chip.peak_bf16
    assert kernel.mxu_busy * kernel.seconds == pytest.approx(found.flops / found.chip.peak_bf16, rel=0.01)
    assert found.peak_share == pytest.approx(kernel.mxu_busy, rel=0.01)
    assert kernel.hot.vmatmul > 0 and 0 < kernel.hot.mxu_busy <= 1
    assert kernel.bytes_out == 1024 * 1024 * 4
    assert sum(block.share for block in kernel.blocks) == pytest.approx(1, abs=0.01)


@pytest.mark.sweep
def test_the_same_call_gives_the_same_cycles():
    again = tpu.inspect(copy, array(1024, 1024), generation="TPU v5 lite")
    assert again == copied("v5e")


@pytest.mark.sweep
def test_twice_the_rows_take_about_twice_the_time():
    one, two = copied("v5e").kernels[0], copied("v5e", rows=2048).kernels[0]
    assert two.cycles == pytest.approx(2 * one.cycles, rel=0.02)
    assert two.bytes_in == 2 * one.bytes_in


def test_sizes_steer_the_time():
    few, many = visited(1, 127), visited(512, 512)
    tile = 128 * 512 * 4
    assert [found.kernels[0].operands_known for found in (few, many)] == [(0,), (0,)]
    assert (few.kernels[0].bytes_out, many.kernels[0].bytes_out) == (tile, 8 * tile)
    assert many.cycles > 4 * few.cycles


@pytest.mark.sweep
def test_sizes_steer_a_kernel_that_xla_makes():
    """`lax.ragged_dot` shows as a kernel only once it is compiled."""
    operands = array(1024, 256, dtype=bf16), array(4, 256, 256, dtype=bf16)
    one, all_four = (
        tpu.inspect(jax.lax.ragged_dot, *operands, np.array(sizes, np.int32), generation="v6e")
        for sizes in ([0, 0, 0, 128], [100, 300, 200, 400])
    )
    assert [kernel.warnings for kernel in all_four.kernels] == [(), ()] and all_four.warnings == ()
    weights = 256 * 256 * 2
    assert all_four.kernels[-1].bytes_in - one.kernels[-1].bytes_in >= 3 * weights
    assert all_four.cycles > 1.5 * one.cycles


@pytest.mark.sweep
def test_a_kernel_with_metadata_is_found():
    def body(x, y):
        y[...] = x[...] * 2

    double = pl.pallas_call(body, out_shape=array(256, 256), metadata={"tile": "512", "kind": "a b"}, name="double")
    (kernel,) = tpu.inspect(lambda x: double(x), array(256, 256)).kernels
    assert kernel.bytes_in == kernel.bytes_out == 256 * 256 * 4


def test_sizes_that_are_not_known_are_told():
    found = tpu.inspect(first_tiles, array(2, dtype=jnp.int32), array(2048, 512))
    (warning,) = found.kernels[0].warnings
    assert "not known" in warning and "operand 0" in warning
    assert warning in str(found)


@pytest.mark.core
def test_too_much_vmem_is_an_answer():
    found = tpu.inspect(copy, array(128, 512 * 1024), generation="v5e")
    assert not found.compiled and found.kernels == () and found.cycles == 0
    assert "vmem" in found.message.lower()
    assert "does not compile" in str(found)


@pytest.mark.sweep
def test_a_kernel_that_its_data_lead_is_refused():
    with pytest.raises(
        tpu.UnknownSchedule, match=r"led_by_data.*cannot be followed(.|\n)*final_bundles.txt:\d+(.|\n)*libtpu"
    ):
        tpu.inspect(led_by_data, array(8, 128), generation="v5e")


@pytest.mark.sweep
def test_xla_around_and_loops_that_are_counted(tmp_path):
    def fn(x, y):
        z = jax.lax.fori_loop(0, 3, lambda i, z: matmul(z.astype(bf16), y), jnp.dot(x, y).astype(jnp.float32))
        return jnp.tanh(z)

    x = array(512, 512, dtype=bf16)
    found = tpu.inspect(fn, x, x, generation="v6e", xla=True, dump=tmp_path)
    (kernel,) = found.kernels
    assert kernel.runs == 3 and found.warnings == ()
    assert any(op.mxu_busy > 0 for op in found.operations) and all(op.cycles for op in found.operations)
    assert found.cycles == 3 * kernel.cycles + sum(op.cycles * op.runs for op in found.operations)
    assert list((tmp_path / "dump").glob("*final_bundles.txt"))
    assert "operations of XLA" in str(found) and ", 3 runs" in str(found)


def test_it_survives_a_trip_through_json():
    found = multiplied()
    loaded = json.loads(found.to_json())
    assert loaded["cycles"] == found.cycles and loaded["kernels"][0]["blocks"][0]["runs"] > 0
    assert loaded["hot"][0]["vmatmul"] == found.kernels[0].hot.vmatmul
    assert loaded["peak_share"] == found.peak_share


def test_it_prints_itself():
    text = str(multiplied())
    for expected in (
        "v6e (TPU v6 lite)", f"jax {jax.__version__}", "kernel matmul", "MXU busy", "hot block", "spilled registers",
        "% of the peak",
    ):  # fmt: skip
        assert expected in text
    assert repr(multiplied()) == text


def test_a_dump_without_the_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(inspection, "programs", lambda folder: {})
    with pytest.raises(tpu.UnknownSchedule, match="the dump has no bundles of this kernel"):
        tpu.inspect(pl.pallas_call(lambda x, y: y.__setitem__(..., x[...]), out_shape=array(8, 128)), array(8, 128))


def test_without_a_kernel_it_says_so():
    assert "xla=True" in str(tpu.Inspection(generation="v6e", jax="1", libtpu="2", compiled=True, message=None))
