"""Kernels as custom calls: what is lowered for a GPU that is not here, and the bytes that jaxlib reads."""

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from jax import export

import trencadis as tr
from trencadis.backends.triton import bridge
from trencadis.core.devices import CARDS
from trencadis.core.jax_compat import JAX, abstract_device

pytestmark = pytest.mark.core

TARGET = "triton_kernel_call_ffi" if JAX >= (0, 11) else "triton_kernel_call"
ARGS = (
    jax.ShapeDtypeStruct((512, 256), jnp.bfloat16),
    jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16),
    jax.ShapeDtypeStruct((8,), jnp.int32),
)


def product(x, w, sizes):
    return tr.grouped_matmul(x, w, sizes, x.dtype)


def lowered(fn, card, *args):
    with abstract_device(card.kind, card.cores, platform=card.platform):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=(card.platform,)).as_text()


@pytest.mark.parametrize("name", ["a100", "mi300x"])
def test_a_product_is_the_list_of_its_tiles_and_one_kernel(name):
    text = lowered(product, CARDS[name], *ARGS)
    assert text.count(f"custom_call @{TARGET}(") == 2
    assert "stablehlo.while" not in text and "stablehlo.transpose" not in text


def test_gradients_are_three_kernels_each_with_its_list():
    def gradients(x, w, sizes):
        return jax.vjp(lambda x, w: product(x, w, sizes), x, w)[1](jnp.ones((512, 512), jnp.bfloat16))

    text = lowered(lambda *xs: (product(*xs), gradients(*xs)), CARDS["a100"], *ARGS)
    assert text.count(f"custom_call @{TARGET}(") == 6


def test_existing_out_is_aliased():
    text = lowered(lambda x, w, s, e: tr.grouped_matmul(x, w, s, existing_out=e), CARDS["a100"], *ARGS,
                   jax.ShapeDtypeStruct((512, 512), jnp.float32))  # fmt: skip
    _, call = (line for line in text.splitlines() if f"@{TARGET}(" in line)
    assert re.search(r"output_operand_alias<output_tuple_indices = \[\], operand_index = 6", call)


def test_equal_products_compile_once(monkeypatch):
    seen = []
    plain = bridge.triton.compile
    monkeypatch.setattr(bridge.triton, "compile", lambda *a, **k: seen.append(1) or plain(*a, **k))
    bridge._compiled.cache_clear()
    lowered(lambda x, w, s: [product(x * i, w, s) for i in range(3)], CARDS["a100"], *ARGS)
    assert len(seen) == 2  # the list of tiles, and the product


def test_exports_for_a_card_that_is_not_here():
    card = CARDS["a100"]
    with abstract_device(card.kind, card.cores, platform="cuda"):
        skip = [export.DisabledSafetyCheck.custom_call(TARGET)]
        exported = export.export(jax.jit(product), platforms=["cuda"], disabled_checks=skip)(*ARGS)
    assert TARGET in exported.mlir_module()


def test_the_message_is_that_of_jaxlib():
    """Bytes that jaxlib's own writer gave for this launch, on jaxlib 0.10.2 and 0.12.0; its plugin is not installed."""
    kernel = bridge.Kernel(function=None, pointers=(), constants=(), arch="9.0", warps=8, stages=3)
    binary = bridge.Binary(name="kern", text="", image="PTX", shared=1000, threads_per_warp=32)
    array = b"*\x04\n\x02\x10\x10"
    code = b'\n\x14\n\x04kern\x10\x08\x18\xe8\x07"\x03PTX0ZP\x01'
    launch = code + b"\x10\xf0\xa2\x04\x18\x01 \x01" + 2 * array
    assert bridge.message(kernel, binary, 70000, 2) == b"\n*" + launch + b'"\x0etrencadis_kern'
