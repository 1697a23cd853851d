"""Grouped matrix multiplication for JAX: many matmuls of uneven sizes as one kernel, on TPU, GPU and CPU."""

import importlib
from typing import TYPE_CHECKING, Any

from trencadis.api.gemm import grouped_dense, grouped_gemm
from trencadis.api.lax import ragged_dot, ragged_dot_general
from trencadis.api.matmul import GroupMetadata, grouped_matmul, make_group_metadata, transposed_grouped_matmul
from trencadis.api.sharding import sharded
from trencadis.core.debug import debug_checks
from trencadis.core.decision import PerformanceWarning
from trencadis.core.named_target import target
from trencadis.core.tiling import Tiling, Tilings
from trencadis.gemm.tensor import GroupedTensor
from trencadis.moe.mlp import moe_mlp
from trencadis.viz import show, show_gemm
from trencadis.why import why

if TYPE_CHECKING:
    from trencadis import compat as compat
    from trencadis import gemm as gemm
    from trencadis import inspect as inspect
    from trencadis import moe as moe
    from trencadis import parallel as parallel
    from trencadis import quant as quant
    from trencadis import viz as viz

__version__ = "0.1.0"

_PACKAGES = ("compat", "gemm", "inspect", "moe", "parallel", "quant", "viz")

# without the packages: `import *` would shadow the standard library's `inspect`
__all__ = [
    "GroupMetadata",
    "GroupedTensor",
    "PerformanceWarning",
    "Tiling",
    "Tilings",
    "debug_checks",
    "grouped_dense",
    "grouped_gemm",
    "grouped_matmul",
    "make_group_metadata",
    "moe_mlp",
    "ragged_dot",
    "ragged_dot_general",
    "sharded",
    "show",
    "show_gemm",
    "target",
    "transposed_grouped_matmul",
    "why",
]


def __getattr__(name: str) -> Any:
    """Import a public package when it is first used, so that `import trencadis` alone stays quick."""
    if name in _PACKAGES:
        return importlib.import_module(f"trencadis.{name}")
    raise AttributeError(f"module 'trencadis' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and packages."""
    return [*sorted([*__all__, *_PACKAGES]), "__version__"]
