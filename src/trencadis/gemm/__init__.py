"""The general grouped GEMM: grouped tensors, and products in which any dimension may be ragged.

tensor      `GroupedTensor`: many matrices of uneven sizes in one array
quantize    grouped tensors of low-precision numbers, with scales by group
operand     an operand of a GEMM: which axes are contracted, which are free, which are ragged
epilogue    `alpha * product + bias + beta * out`, by group
problem     the static description of a GEMM with several ragged dimensions
autodiff    its primitive: JVP, transpose and batching rules
lowering    from operands to that problem
xla         its backend
"""

from trencadis.gemm.quantize import grouped_quantize
from trencadis.gemm.tensor import GroupedTensor

__all__ = ["GroupedTensor", "grouped_quantize"]
