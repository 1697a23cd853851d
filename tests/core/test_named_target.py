"""`target`: what is lowered inside for its platform holds the kernels for it; nothing else changes."""

import contextlib
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest

import trencadis as tr
from trencadis.core.devices import CARDS, CHIPS, target_of

pytestmark = pytest.mark.core

ALLOWED = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
KERNEL = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}


def structs(k=128):
    shapes = ((64, k), jnp.bfloat16), ((4, k, 128), jnp.bfloat16), ((4,), jnp.int32)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


def has_kernel(fn, platform="cuda", k=128):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tr.PerformanceWarning)
        return KERNEL[platform] in fn.trace(*structs(k)).lower(lowering_platforms=(platform,)).as_text()


def fresh():
    return jax.jit(lambda x, w, s: tr.grouped_matmul(x, w, s, jnp.bfloat16))


@pytest.mark.parametrize("name", ["h200", "v7x"])
def test_exports_hold_the_kernels(name):
    with tr.target(name) as chosen:
        exported = jax.export.export(fresh(), platforms=[chosen.platform], disabled_checks=ALLOWED)(*structs())
        assert tr.why(*structs()).target == chosen == target_of(name)
    again = jax.export.deserialize(exported.serialize())
    assert KERNEL[chosen.platform] in again.mlir_module() and again.platforms == (chosen.platform,)


def test_caches_of_jit_are_not_shared():
    """One function, lowered outside, inside, and outside again; traced outside and lowered inside, too."""
    fn = fresh()
    assert not has_kernel(fn)
    with tr.target("h200"):
        assert has_kernel(fn)
    assert not has_kernel(fn)
    traced, lower = fn.trace(*structs(256)), {"lowering_platforms": ("cuda",)}
    with tr.target("h200"):
        assert "mosaic_gpu" in traced.lower(**lower).as_text()
    with pytest.warns(tr.PerformanceWarning, match=r'trencadis.target\("h200"\)'):
        assert "mosaic_gpu" not in traced.lower(**lower).as_text()


def test_other_platforms_and_what_runs_here_stay_as_they_are():
    fn, args = fresh(), (jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.array([4]))
    want = fn(*args)
    with tr.target("h200"):
        assert (fn(*args) == want).all() and "mosaic_gpu" not in fn.lower(*args).as_text()
        with tr.target("v6e"):  # the inner one counts, and the outer one is no TPU
            assert has_kernel(fn, "tpu") and not has_kernel(fn)
        assert has_kernel(fn) and str(target_of(None)) == "cuda (NVIDIA H200)"
    assert target_of(None).platform == "cpu"


def test_it_is_a_decorator_and_each_thread_has_its_own():
    seen, inside, done = [], threading.Event(), threading.Event()

    @tr.target("v6e")
    def other():
        seen.append(target_of(None).kind)
        inside.set()
        done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    seen.append(target_of(None).kind)
    done.set()
    thread.join()
    other()
    assert seen == [CHIPS["v6e"].kind, "cpu", CHIPS["v6e"].kind]


def test_errors_restore_it():
    with contextlib.suppress(RuntimeError), tr.target("h200"):
        raise RuntimeError
    assert target_of(None).platform == "cpu"


@pytest.mark.parametrize("wrong", ["h300", None, 3])
def test_names_that_are_not_known(wrong):
    with pytest.raises(ValueError, match=r"target: want .*'h200'"):
        tr.target(wrong)


def test_every_device_has_a_name():
    for name in (*CARDS, *CHIPS):
        with tr.target(name) as chosen:
            assert chosen.kind in {each.kind for each in (*CARDS.values(), *CHIPS.values())}
