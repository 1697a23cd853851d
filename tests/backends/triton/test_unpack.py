"""The PTX that unpacks weights, instruction by instruction in Python, for every byte."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.ptx import pairs, run
from trencadis.backends.triton.unpack import product, unpack, unpack_words
from trencadis.core.interleave import interleave

pytestmark = pytest.mark.core

VALUES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


@pytest.mark.parametrize("rows", ["bfloat16", "float16"])
@pytest.mark.parametrize("values", VALUES)
def test_every_byte(values, rows):
    data = np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8))
    narrow = values in ("int4", "float4_e2m1fn")
    for high in (False, True) if narrow else (False,):
        known = run(unpack(values, rows, high=high), **{"$2": data.view(np.uint32)})
        got = np.concatenate([pairs(known[f"${i}"], rows) for i in (0, 1)], 1).ravel()
        bits = (data >> 4 if high else data & 15) if narrow else data
        want = bits.view(jnp.dtype(values)) if values != "int4" else (bits.astype(np.int8) ^ 8) - 8
        np.testing.assert_array_equal(got, want.astype(np.float64))


@pytest.mark.parametrize("rows", ["bfloat16", "float16"])
@pytest.mark.parametrize("values", VALUES)
def test_every_interleaved_word(values, rows):
    """Pair p of the word of lane l is entries 8 p + 2 l and 8 p + 2 l + 1 of a run."""
    data = np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8))
    narrow = values in ("int4", "float4_e2m1fn")
    nibbles = np.stack([data & 15, data >> 4], 1).ravel()
    bits = nibbles if narrow else data
    weights = ((bits.astype(np.int8) ^ 8) - 8 if values == "int4" else bits.view(jnp.dtype(values))).astype(values)
    stored = np.asarray(interleave(weights))
    stored = (stored.view(np.uint8) & 15).reshape(-1, 2) @ np.array([1, 16]) if narrow else stored
    words = stored.astype(np.uint8).view(np.uint32) if narrow else stored.view(np.uint32)
    count = 4 if narrow else 2
    known = run(unpack_words(values, rows), **{f"${count}": words})
    got = np.stack([pairs(known[f"${i}"], rows) for i in range(count)], 1)  # [words, pairs, 2]
    want = weights.astype(np.float64).reshape(-1, count, 4, 2).swapaxes(1, 2)  # [runs, lanes, pairs, 2]
    np.testing.assert_array_equal(got, want.reshape(got.shape))


def test_products_keep_the_sign_of_zero():
    known = run(product("bfloat16"), **{"$1": [0x80003F80], "$2": [0x3F804000]})
    assert known["$0"] == 0x80004000


def test_results_are_written_last():
    """A result may have the register of the bytes."""
    text = unpack("int8", "bfloat16")
    assert max(at.start() for at in re.finditer(r"\$2", text)) < text.index("$0")
