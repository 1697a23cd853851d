"""The PTX that unpacks weights, instruction by instruction in Python, for every byte."""

import operator
import re

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.backends.triton.unpack import product, unpack

pytestmark = pytest.mark.core

VALUES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")

OPERATIONS = {
    "mov": lambda a: a, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift,
    "shr": operator.rshift, "add": operator.add, "mad": lambda a, b, c: a * b + c,
}  # fmt: skip


def pairs(bits, rows):
    """The two numbers of each register, in float64."""
    with np.errstate(invalid="ignore"):
        return bits.astype(np.uint32).view(np.uint16).reshape(-1, 2).view(jnp.dtype(rows)).astype(np.float64)


def run(text, **registers):
    """The registers after some PTX; each is an array, one entry for each thread."""
    known = {name: np.asarray(value, np.uint64) for name, value in registers.items()}

    def read(word):
        return np.asarray(int(word, 0), np.uint64) if word[0].isdigit() else known[word]

    for line in filter(None, (each.strip() for each in text.strip("{} ").split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(" ", 1)
        out, *words = (word.strip() for word in rest.split(","))
        a, b, c = ([read(word) for word in words] + [None, None])[:3]
        if op == "prmt.b32":
            both = a | b << np.uint64(32)
            picks = [int(c) >> 4 * i & 7 for i in range(4)]
            z = sum((both >> np.uint64(8 * pick) & np.uint64(255)) << np.uint64(8 * i) for i, pick in enumerate(picks))
        elif op.startswith("fma.rn"):
            rows = "bfloat16" if "bf16" in op else "float16"
            shape = np.broadcast(a, b, c).shape
            x, y, z = (pairs(np.broadcast_to(v, shape).ravel(), rows) for v in (a, b, c))
            z = np.ascontiguousarray((x * y + z).astype(jnp.dtype(rows))).view(np.uint32).reshape(shape)
        else:
            z = OPERATIONS[op.split(".")[0]](*filter(lambda v: v is not None, (a, b, c)))
        known[out] = np.asarray(z, np.uint64) & np.uint64(0xFFFFFFFF)
    return known


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


def test_products_keep_the_sign_of_zero():
    known = run(product("bfloat16"), **{"$1": [0x80003F80], "$2": [0x3F804000]})
    assert known["$0"] == 0x80004000


def test_results_are_written_last():
    """A result may have the register of the bytes."""
    text = unpack("int8", "bfloat16")
    assert max(at.start() for at in re.finditer(r"\$2", text)) < text.index("$0")
