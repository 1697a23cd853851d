"""Grouped matrix multiplication for JAX: many matmuls of uneven sizes, laid as one."""

from trencadis.api import GroupMetadata as GroupMetadata
from trencadis.api import grouped_matmul as grouped_matmul
from trencadis.api import make_group_metadata as make_group_metadata
from trencadis.api import transposed_grouped_matmul as transposed_grouped_matmul
from trencadis.debug import debug_checks as debug_checks
from trencadis.ragged import ragged_dot as ragged_dot
from trencadis.ragged import ragged_dot_general as ragged_dot_general
from trencadis.tiling import Tiling as Tiling
from trencadis.tiling import Tilings as Tilings

__version__ = "0.1.0"
