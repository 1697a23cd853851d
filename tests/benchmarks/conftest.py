"""Results of a tiny run, made once."""

import dataclasses

import pytest

from benchmarks import measure, peers, report

from .fakes import TINY, CountingClock


@pytest.fixture(scope="package")
def made():
    """Two passes of one problem, and one that differs in m alone under the name of a scaling problem."""
    how = measure.How(clock=CountingClock(), rounds=2, memory=True)
    found = report.Results(command="run", environment=report.environment(["run", "--problems", "tiny"], "fake"))
    series = [dataclasses.replace(TINY, name=name, m=m) for name, m in (("m1024", 20), ("m2048", 40))]
    for problem, passes in ((TINY, ["forward", "d_rhs"]), *((p, ["forward"]) for p in series)):
        found.shapes[problem.name] = problem.shape()
        found.records += measure.problem_records(problem, ["f32"], passes, peers.select("numpy,dense"), how)
    return found
