from benchmarks import cases, oracle, quantized_cases
from benchmarks.report import RESULTS, Results


def test_the_cases_of_the_check():
    every = cases.cases()
    assert len({case.name for case in every}) == len(every) == 175
    for case in every:
        sizes = cases.group_sizes(case.sizes, case.call.m, case.call.g, case.seed)
        assert sizes.sum() <= case.call.m and case.first + case.call.local <= case.call.g
    assert len(quantized_cases.checks()) == 37  # and more on a GPU


def test_the_results_of_the_check_are_of_these_cases():
    every = Results.read(RESULTS / "nvidia-h200" / "2026-11-19-check.json").records
    records = [record for record in every if not record.problem.startswith("quantized ")]
    by_name = {case.name: case for case in cases.cases()}
    assert {record.problem for record in records} == set(by_name)
    assert all(record.error <= record.limit and not record.why for record in every)
    plain = by_name["rows bf16 f32, random"]
    assert records[0].limit == oracle.limit("float32", depth=plain.call.k)
