"""The general grouped GEMM: grouped tensors, and products in which any of m, k and n may be ragged.

tensor       `GroupedTensor`: many matrices of uneven sizes in one array
elementwise  its operators and `map`
sizes        sizes of groups: static or arrays, their checks, and where groups start
ownership    which entries belong to which group
quantize     grouped tensors of low-precision numbers, with scales by group
operand      an operand of a GEMM: which axes are contracted, which are free, which are ragged
epilogue     `alpha * product + bias + beta * out`, by group
forms        the forms by which of m, k and n are ragged, and the kernels they go to
lowering     from operands with several ragged dimensions to a problem and its arrays
problem      the static description of that problem
autodiff     its primitive: JVP, transpose and batching rules
plan         the decision of its backend
by_group     a number for each group at all of its entries, and sums by group
matrices     where matrices are in arrays, as the kernels count; flat: arrays as flat buffers, for TPUs
tpu          its backend of Pallas kernels, with resident: one kernel for groups whose rhs fits into VMEM
triton       its backend of Triton kernels; cpu: of one native kernel; xla: of XLA's operations
debug        run-time checks of traced sizes
"""

from trencadis.gemm.quantize import grouped_quantize
from trencadis.gemm.tensor import GroupedTensor

__all__ = ["GroupedTensor", "grouped_quantize"]
