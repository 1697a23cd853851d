"""Random group sizes: they sum to m, repeat with their seed, and bad arguments are named."""

import pytest

from trencadis.cli.sizes import SKEWS, random_sizes

pytestmark = pytest.mark.core


@pytest.mark.parametrize("skew", SKEWS)
def test_random_sizes(skew):
    sizes = random_sizes(16, 10_000, skew=skew, seed=3)
    assert len(sizes) == 16 and sum(sizes) == 10_000 and min(sizes) >= 0
    assert sizes == random_sizes(16, 10_000, skew=skew, seed=3)
    if skew == "balanced":
        assert max(sizes) - min(sizes) <= 1
    for bad in (dict(groups=0, m=1), dict(groups=1, m=-1), dict(groups=1, m=1, skew="steep")):
        with pytest.raises(ValueError, match="want"):
            random_sizes(**bad)
