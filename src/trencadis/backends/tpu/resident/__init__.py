"""The kernel of the general grouped GEMM for groups whose rhs fits into VMEM: from flat buffers to flat buffers.

Rows of a flat buffer start anywhere, and a copy between HBM and VMEM moves whole tiles. So rows are shifted to whole
lanes in VMEM, while the products of rows that were shifted before are computed, and results are shifted back.

table      the entries of the table in SMEM: which matrices are multiplied
layout     the sizes for a chip;  sizes: what they are
state      counters, and first-in-first-out buffers
align      flat rows to blocks of 128 lanes;  stream: both operands, in the order in which products need them
products   the products of blocks
strips     parts of the result;  epilogue: alpha, bias, beta;  collect: sums to flat rows
seam       the part of the result where the entries of two cores meet
kernel     all of them in one loop
"""
