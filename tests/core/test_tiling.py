"""Every spelling of a tiling, and what a derivative makes of it."""

import pytest

from trencadis.core.tiling import Overrides, Tiling, Tilings, resolve

pytestmark = pytest.mark.core


def test_spellings():
    tile = Tiling(1, 2, 3)
    same = Tilings(forward=tile, d_lhs=tile, d_rhs=tile)
    assert resolve(None, 8, 8, 8) == Tilings()
    for spelling in (tile, (1, 2, 3), [1, 2, 3], lambda m, k, n: (m, k, n), lambda m, k, n: tile):
        assert resolve(spelling, 1, 2, 3) == same
    assert resolve(lambda m, k, n: None, 1, 2, 3) == Tilings()
    assert resolve(Tilings(d_lhs=lambda m, k, n: (n, m, k)), 1, 2, 3) == Tilings(d_lhs=Tiling(3, 1, 2))
    assert resolve(lambda m, k, n: Tilings(d_rhs=(k, k, k)), 1, 2, 3) == Tilings(d_rhs=Tiling(2, 2, 2))
    assert str(tile) == "1·2·3"


def test_sizes_stay_with_their_dimensions():
    overrides = Overrides(tilings=resolve((1, 2, 3), 8, 8, 8))
    assert overrides.derive(overrides.tilings.d_lhs, swap=True).tilings.forward == Tiling(1, 3, 2)
    assert overrides.derive(overrides.tilings.d_lhs, swap=True).derive(None, swap=True) == overrides
    own = Overrides(backend="xla", tilings=Tilings(forward=Tiling(1, 1, 1), d_lhs=Tiling(4, 5, 6)))
    derived = own.derive(own.tilings.d_lhs, swap=True)
    assert derived == Overrides(backend="xla", tilings=Tilings(forward=Tiling(4, 6, 5)))
    assert own.derive(own.tilings.d_rhs, swap=False).tilings == Tilings()
