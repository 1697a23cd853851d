"""Grouped matrix multiplication for JAX: many matmuls of uneven sizes, laid as one."""

from trencadis.api.gemm import grouped_dense, grouped_gemm
from trencadis.api.lax import ragged_dot, ragged_dot_general
from trencadis.api.matmul import GroupMetadata, grouped_matmul, make_group_metadata, transposed_grouped_matmul
from trencadis.core.debug import debug_checks
from trencadis.core.tiling import Tiling, Tilings
from trencadis.gemm.tensor import GroupedTensor
from trencadis.viz import show, show_gemm
from trencadis.why import why

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
    "show_gemm",
    "transposed_grouped_matmul",
    "why",
]

__version__ = "0.1.0"
