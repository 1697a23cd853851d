"""Drop-in modules: other libraries' names, signatures and error texts over this library's operations.

- `trencadis.compat.megablox`: `jax.experimental.pallas.ops.tpu.megablox`, and the megablox of MaxText.
- `trencadis.compat.maxtext`: the same with MaxText's quantized training.
- `trencadis.compat.ejkernel`: ejkernel's `grouped_matmul` family.
- `trencadis.compat.transformer_engine`: TransformerEngine's grouped tensors and GEMMs for JAX.
"""

from __future__ import annotations

from typing import Any

from trencadis.core.tiling import Tiling, Tilings

CUBE = (128, 128, 128)


def planned(tiling: Any) -> Any:
    """None for the peers' default tile, `(128, 128, 128)` or nine times 128; anything else as it is.

    The peers default to it because it always runs, not because anybody wants it: here the default is to plan. For that
    very tile, pass `trencadis.Tiling(128, 128, 128)`.
    """
    return None if isinstance(tiling, (tuple, list)) and tuple(tiling) in (CUBE, 3 * CUBE) else tiling


def tilings(tiling: Any) -> Any:
    """What a peer's `tiling` of a grouped matmul and its two gradients means here.

    A peer gives each pass a tile in the units of that pass's own call. In the call that computes the gradient of lhs,
    k and n have changed places; here every tile is in the units of the m, k and n of the forward call.

    - the peers' default: planned tiles.
    - three numbers: the tile of every pass, each number staying with its dimension.
    - nine, as MaxText has them: forward, gradient of lhs, gradient of rhs; the middle three come as (m, n, k).
    - a function: asked for each pass with the m, k and n of that pass's call.

    >>> tilings((8, 16, 32, 8, 64, 48, 8, 4, 2))
    Tilings(forward=(8, 16, 32), d_lhs=(8, 48, 64), d_rhs=(8, 4, 2))
    """
    tiling = planned(tiling)
    if callable(tiling):
        return Tilings(forward=tiling, d_lhs=lambda m, k, n: _swapped(_look_up(tiling, m, n, k)), d_rhs=tiling)
    if isinstance(tiling, (tuple, list)) and len(tiling) == 9:
        return Tilings(forward=tiling[:3], d_lhs=_swapped(tiling[3:6]), d_rhs=tiling[6:])
    return tiling


def _look_up(table: Any, m: int, k: int, n: int) -> Any:
    """A gradient's tile; a table that has none is only asked in earnest by a call that computes gradients."""
    try:
        return table(m, k, n)
    except LookupError:
        return None


def _swapped(tile: Any) -> Any:
    if isinstance(tile, Tiling):
        return tile.swapped()
    return tile if tile is None else (tile[0], tile[2], tile[1])
