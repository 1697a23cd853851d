"""Grouped matrix multiplication for JAX: many matmuls of uneven sizes, laid as one."""

from trencadis.api import GroupMetadata, grouped_matmul, make_group_metadata, transposed_grouped_matmul
from trencadis.debug import debug_checks
from trencadis.grouped import grouped_dense, grouped_gemm
from trencadis.looking import show, why
from trencadis.ragged import ragged_dot, ragged_dot_general
from trencadis.tensors import GroupedTensor
from trencadis.tiling import Tiling, Tilings

__all__ = [
    "GroupMetadata",
    "GroupedTensor",
    "Tiling",
    "Tilings",
    "debug_checks",
    "grouped_dense",
    "grouped_gemm",
    "grouped_matmul",
    "make_group_metadata",
    "ragged_dot",
    "ragged_dot_general",
    "show",
    "transposed_grouped_matmul",
    "why",
]

__version__ = "0.1.0"
