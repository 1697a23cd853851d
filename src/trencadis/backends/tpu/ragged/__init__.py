"""Kernels of the general grouped GEMM: groups that differ in more than one of m, k and n.

A copy between HBM and VMEM moves whole tiles of 8 x 128 numbers, and rows of a flat buffer start anywhere. So there are
three kernels: `align` writes the matrices of an operand as blocks of 128 x 128, `multiply` computes the
products of such blocks, and `collect` applies the epilogue and writes the rows of the results one after the other.

blocks     where the blocks of each group are, and the tables that the kernels read from SMEM
flat       copies of parts of a flat buffer, whose length is any number
align      flat rows to blocks
multiply   the products of blocks
collect    blocks to flat rows, with the epilogue
loop       the loop over tiles with prefetched operands, which all three share
"""
