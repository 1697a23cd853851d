"""Weights of int4 as bytes, by a model of the instructions that unpack them."""

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.backends.gpu.unpack import QUAD, TEXT, table

pytestmark = pytest.mark.core


def permuted(a, b, selector):
    """prmt.b32: bytes of two words; the upper bit of a nibble of the selector takes the sign of its byte instead."""
    both, out = b << 32 | a, 0
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = both >> 8 * (pick & 7) & 255
        out |= ((255 if byte & 128 else 0) if pick & 8 else byte) << 8 * i
    return out


OPERATIONS = {
    "and": lambda a, b: a & b, "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b & 0xFFFFFFFF, "prmt": permuted,
    "lop3": lambda a, b, c, table: a & b | ~a & c,
}  # fmt: skip


def run(text, results, word, tables):
    """The results of a text, so many of them, for a word."""
    known = {f"${results}": word, **{f"${results + 1 + i}": value for i, value in enumerate(tables)}}
    for line in filter(None, (each.strip() for each in text.strip("{} \n").split(";"))):
        if not line.startswith(".reg"):
            op, rest = line.split(" ", 1)
            out, *names = (name.strip() for name in rest.split(","))
            known[out] = OPERATIONS[op.split(".")[0]](*(known[x] if x in known else int(x, 0) for x in names))
    return [known[f"${i}"] for i in range(results)]


@pytest.mark.parametrize("target", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_every_number_in_every_place(target):
    for first in range(16):
        nibbles = (np.arange(8) * 5 + first) % 16
        word = int(sum(int(x) << 4 * i for i, x in enumerate(nibbles)))
        got = np.array(run(TEXT, 2, word, table(jnp.dtype(target))), np.uint32).view(jnp.dtype(target))
        np.testing.assert_array_equal(got.astype(np.float32), (nibbles ^ 8) - 8)
        half = np.array(run(QUAD, 1, word & 0xFFFF, table(jnp.dtype(target))), np.uint32).view(jnp.dtype(target))
        np.testing.assert_array_equal(half.astype(np.float32), (nibbles[:4] ^ 8) - 8)


def test_the_table_of_select_is_that_of_the_model():
    """0xCA takes the second operand where the first has a bit, and otherwise the third."""
    want = sum((b if a else c) << (a << 2 | b << 1 | c) for a in (0, 1) for b in (0, 1) for c in (0, 1))
    assert want == 0xCA and all(text.count("0xCA") == text.count("lop3") > 0 for text in (TEXT, QUAD))
