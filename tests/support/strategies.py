"""Group sizes as they come: empty groups, one group with everything, unowned rows."""

import numpy as np
from hypothesis import strategies as st


@st.composite
def sizes(draw, m, groups):
    kind = draw(st.sampled_from(["cuts", "one", "none", "full"]))
    if kind == "none" or groups == 0:
        return np.zeros(groups, np.int32)
    if kind == "one":
        out = np.zeros(groups, np.int32)
        out[draw(st.integers(0, groups - 1))] = draw(st.integers(0, m))
        return out
    cuts = sorted(draw(st.lists(st.integers(0, m), min_size=groups, max_size=groups)))
    if kind == "full":
        cuts[-1] = m
    return np.diff([0, *cuts]).astype(np.int32)


seeds = st.integers(0, 2**16)
