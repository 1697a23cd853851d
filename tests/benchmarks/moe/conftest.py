"""A tiny layer whose calls are compiled once for all tests."""

import jax
import pytest

from benchmarks.moe.prepared import Prepared
from benchmarks.moe.shapes import MoeShape

TINY = MoeShape(name="tiny", t=12, k=2, d=8, f=6, e=4, dtype="f32", biases=True, swiglu=(1.5, 1.7, 0.5))
NAMES = ("ours", "composed", "ragged_dot")


@pytest.fixture(scope="package")
def prepared():
    return Prepared(TINY, NAMES, threads=2)


@pytest.fixture(scope="package")
def operands(prepared):
    return jax.block_until_ready(prepared.make())
