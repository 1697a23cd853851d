"""A decode step with quantized experts equals the float64 layer on the dequantized ones."""

import jax
import pytest

from benchmarks.moe.prepared import Prepared
from benchmarks.moe.shapes import MoeShape


@pytest.mark.parametrize("weights", ["mxfp4", "int4-128"])
def test_quantized_experts(weights):
    shape = MoeShape(name="decode", t=4, k=2, d=32, f=32, e=4, weights=weights)
    prepared = Prepared(shape, ["ours"], threads=2)
    x = prepared.make()
    call, record = prepared.layer(x, "forward", "ours")
    assert call is not None and record.error < record.limit and record.dtype == f"w-{weights}"
    assert not isinstance(x.params.gate, jax.Array) and not isinstance(x.joined.gate_up, jax.Array)
