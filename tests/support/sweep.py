"""Long tables of cases: a part that meets every kind of case runs by default, the rest with `make test-sweep`."""

import pytest


def sweep(cases, default):
    """Parameters for `parametrize`: all cases, those that are not in `default` with the marker `sweep`."""
    cases, default = list(cases), list(default)
    missing = [case for case in default if case not in cases]
    assert not missing, f"default: no such cases: {missing}"
    return [case if case in default else marked(case) for case in cases]


def marked(case):
    """A case, a tuple or a single value, with the marker `sweep`."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.sweep)
