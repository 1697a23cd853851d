"""TransformerEngine's grouped GEMM for JAX, in the version whose grouped tensors have `first_dims` and `last_dims`.

`from trencadis.compat.transformer_engine import GroupedNoScaleTensor, grouped_gemm, grouped_dense, grouped_dbias` runs
on every backend. Group sizes may have any values: groups may be empty, and rows past the last group are unowned, so
that they are 0 in results and in gradients. `group_offset`, `precision` and a bias are honoured. A tensor with scales
may be multiplied with one without.
"""

from trencadis.compat.transformer_engine.dense import grouped_dbias, grouped_dense
from trencadis.compat.transformer_engine.gemm import grouped_gemm
from trencadis.compat.transformer_engine.quantize import grouped_dequantize, grouped_quantize
from trencadis.compat.transformer_engine.quantizers import (
    GroupedQuantizer,
    QuantizeLayout,
    QuantizerFactory,
    QuantizerSet,
    ScalingMode,
    TensorUsage,
    noop_quantizer_set,
)
from trencadis.compat.transformer_engine.tensors import GroupedNoScaleTensor, GroupedScaledTensor1x, ScaledTensor2x

__all__ = [
    "GroupedNoScaleTensor",
    "GroupedQuantizer",
    "GroupedScaledTensor1x",
    "QuantizeLayout",
    "QuantizerFactory",
    "QuantizerSet",
    "ScaledTensor2x",
    "ScalingMode",
    "TensorUsage",
    "grouped_dbias",
    "grouped_dense",
    "grouped_dequantize",
    "grouped_gemm",
    "grouped_quantize",
    "noop_quantizer_set",
]
