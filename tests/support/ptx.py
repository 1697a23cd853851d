"""A model of the PTX instructions with which kernels unpack weights."""

import operator
import re

import jax.numpy as jnp
import numpy as np

OPERATIONS = {
    "mov": lambda a: a, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift,
    "shr": operator.rshift, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "mad": lambda a, b, c: a * b + c,
}  # fmt: skip
ARITHMETIC = {"mul": operator.mul, "sub": operator.sub, "fma": lambda a, b, c: a * b + c}


def pairs(bits, rows):
    """The two numbers of each register, in float64."""
    with np.errstate(invalid="ignore"):
        return bits.astype(np.uint32).view(np.uint16).reshape(-1, 2).view(jnp.dtype(rows)).astype(np.float64)


def run(text, **registers):
    """The registers after some PTX; each is an array, one entry for each thread."""
    known = {name: np.asarray(value, np.uint64) for name, value in registers.items()}

    def read(word):
        if word[0] == "{":  # two halves
            low, high = (known[half.strip()] for half in word[1:-1].split(","))
            return low | high << np.uint64(16)
        return np.asarray(int(word, 0), np.uint64) if word[0].isdigit() else known[word]

    for line in filter(None, (each.strip() for each in _inside(text).split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(" ", 1)
        out, *words = (word.strip() for word in re.split(r",(?![^{]*})", rest))
        found = np.asarray(_result(op, [read(word) for word in words]), np.uint64) & np.uint64(0xFFFFFFFF)
        if out[0] == "{":
            low, high = out[1:-1].split(",")
            known |= {low.strip(): found & np.uint64(0xFFFF), high.strip(): found >> np.uint64(16)}
        else:
            known[out] = found
    return known


def _inside(text):
    """The instructions of a text, without the braces of scopes, which begin with registers or with another one."""
    text = re.sub(r"\{\s*(?=[.{])", "", re.sub(r";\s*\}", ";", text))
    return re.sub(r";\s*\}", ";", text)


def _converted(to, source, given):
    """Numbers of 8 bits to float16, of float16 to float32, and two of float32 to bfloat16."""
    if source in ("e4m3x2", "e5m2x2"):
        kind = jnp.float8_e4m3fn if source == "e4m3x2" else jnp.float8_e5m2
        numbers = given[0].astype(np.uint16).view(np.uint8).view(kind).astype(np.float16)
        return numbers.view(np.uint32)
    if to == "f32":
        return given[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    assert to == "bf16x2"
    high, low = (x.astype(np.uint32).view(np.float32).astype(jnp.bfloat16).view(np.uint16) for x in given)
    return low | high.astype(np.uint32) << 16


def _result(op, given):
    kind = op.split(".")[0]
    if kind == "prmt":
        both = given[0] | given[1] << np.uint64(32)
        picks = [int(given[2]) >> 4 * i & 7 for i in range(4)]
        return sum((both >> np.uint64(8 * pick) & np.uint64(255)) << np.uint64(8 * i) for i, pick in enumerate(picks))
    if kind == "lop3":
        *words, table = given
        bits = [[word >> np.uint64(i) & np.uint64(1) for i in range(32)] for word in words]
        which = [a * np.uint64(4) + b * np.uint64(2) + c for a, b, c in zip(*bits, strict=True)]
        return sum((table >> one & np.uint64(1)) << np.uint64(i) for i, one in enumerate(which))
    if op == "shf.l.wrap.b32":
        low, high, by = given
        return (high << np.uint64(32) | low) << by >> np.uint64(32)
    if kind == "cvt":
        return _converted(*op.split(".")[-2:], given)
    if op == "max.u16x2":
        halves = [[word >> np.uint64(by) & np.uint64(0xFFFF) for word in given] for by in (0, 16)]
        return np.maximum(*halves[0]) | np.maximum(*halves[1]) << np.uint64(16)
    if "16x2" in op:
        rows = "bfloat16" if "bf16" in op else "float16"
        shape = np.broadcast(*given).shape
        numbers = [pairs(np.broadcast_to(word, shape).ravel(), rows) for word in given]
        found = ARITHMETIC[kind](*numbers).astype(jnp.dtype(rows))
        return np.ascontiguousarray(found).view(np.uint32).reshape(shape)
    return OPERATIONS[kind](*given)
