"""Random operands for the small problem that `stand_in` defines."""

import numpy as np
import pytest
from stand_in import SIZES, K, M, N


@pytest.fixture
def x(rng):
    return rng.normal(size=(M, K)).astype(np.float32)


@pytest.fixture
def w(rng):
    return rng.normal(size=(len(SIZES), K, N)).astype(np.float32)


@pytest.fixture
def y(rng):
    return rng.normal(size=(M, N)).astype(np.float32)
