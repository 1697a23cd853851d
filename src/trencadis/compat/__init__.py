"""Drop-in modules: the names, signatures and error texts of other libraries over the operations of this one.

- `trencadis.compat.megablox`: `jax.experimental.pallas.ops.tpu.megablox`, and the megablox of MaxText.
- `trencadis.compat.maxtext`: the same with MaxText's quantized training.
- `trencadis.compat.ejkernel`: ejkernel's `grouped_matmul` and its companions.
- `trencadis.compat.transformer_engine`: TransformerEngine's grouped tensors and GEMMs for JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trencadis.core.tiling import Tiling, Tilings

if TYPE_CHECKING:
    from trencadis.compat import ejkernel, maxtext, megablox, transformer_engine

__all__ = ["ejkernel", "maxtext", "megablox", "transformer_engine"]

PeerTiling = Tiling | Tilings | Sequence[int] | Callable[[int, int, int], Any] | None

DEFAULT_TILE = (128, 128, 128)


def __getattr__(name: str) -> Any:
    """Import a drop-in module when it is first used."""
    if name in __all__:
        return importlib.import_module(f"trencadis.compat.{name}")
    raise AttributeError(f"module 'trencadis.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The drop-in modules, and `tilings`, which translates the tilings of their originals."""
    return [*__all__, "tilings"]


def none_if_default(tiling: PeerTiling) -> Any:
    """None for the peers' default tiling, `(128, 128, 128)` or nine times 128; any other tiling as it is.

    The peers have this default because it always runs, not because it is a good tile: here it means a planned tile.
    Pass `trencadis.Tiling(128, 128, 128)` to get that very tile.

    >>> none_if_default((128, 128, 128)), none_if_default((128, 128, 256))
    (None, (128, 128, 256))
    """
    if isinstance(tiling, (tuple, list)) and tuple(tiling) in (DEFAULT_TILE, 3 * DEFAULT_TILE):
        return None
    return tiling


def tilings(tiling: PeerTiling) -> Any:
    """Translate a peer's `tiling` of a grouped matmul and its two gradients to the `tiling` of `grouped_matmul`.

    A peer gives each pass a tile in the units of that pass's own call. In the call that computes the gradient of lhs,
    k and n change places; here every tile is in the units of the m, k and n of the forward call.

    - The peers' default: planned tiles.
    - Three numbers: the tile of every pass; each number stays with its dimension.
    - Nine numbers, as in MaxText: forward, gradient of lhs, gradient of rhs; the middle three come as (m, n, k).
    - A function: called for each pass with the m, k and n of that pass's call.

    >>> tilings((8, 16, 32, 8, 64, 48, 8, 4, 2))
    Tilings(forward=(8, 16, 32), d_lhs=(8, 48, 64), d_rhs=(8, 4, 2))
    """
    tiling = none_if_default(tiling)
    if callable(tiling):
        return Tilings(forward=tiling, d_lhs=lambda m, k, n: _swapped(_look_up(tiling, m, n, k)), d_rhs=tiling)
    if isinstance(tiling, (tuple, list)) and len(tiling) == 9:
        return Tilings(forward=tiling[:3], d_lhs=_swapped(tiling[3:6]), d_rhs=tiling[6:])
    return tiling


def _look_up(table: Callable[[int, int, int], Any], m: int, k: int, n: int) -> Any:
    """The tile that a function gives for a gradient, or None if it raises LookupError.

    The tilings of gradients are asked for in every call, and a table without them is right for a call that needs none.
    """
    try:
        return table(m, k, n)
    except LookupError:
        return None


def _swapped(tile: Any) -> Any:
    """The tile with its sizes of k and n exchanged; what is not a tile as it is, for `grouped_matmul` to refuse."""
    if isinstance(tile, Tiling):
        return tile.swapped()
    return (tile[0], tile[2], tile[1]) if isinstance(tile, (tuple, list)) and len(tile) == 3 else tile
