import pathlib

import pytest

from benchmarks import tpu_table
from benchmarks.problems import PROBLEMS, UnknownName
from benchmarks.report import RESULTS, Record, Results
from benchmarks.timing import Stats

ROOT = pathlib.Path(__file__).parents[2]
OLD, NEW = {"jax": "0.10.2", "libtpu": "0.0.42.1"}, {"jax": "0.12.0", "libtpu": "0.0.50.1"}


def record(contender, problem, which, chip, seconds=None, *, dtype="bf16", versions=OLD, **more):
    time = None if seconds is None else Stats(median=seconds)
    details = {"versions": versions, **({"tiling": more.pop("tiling")} if "tiling" in more else {})}
    return Record(
        contender=contender, problem=f"{problem}-tpu", which=which, device=chip, dtype=dtype, time=time,
        details=details, **more,
    )  # fmt: skip


OURS = OLD | {"trencadis": "0.1"}
RECORDS = [
    record("ours", "qwen3", "forward", "v6e", 3.2e-4, versions=OURS),
    record("megablox", "qwen3", "forward", "v6e", 4.5e-4, tiling=[128, 2048, 768]),
    record("megablox", "qwen3", "forward", "v6e", 4e-4, tiling=[256, 2048, 768]),
    record("tokamax v2", "qwen3", "forward", "v6e", 6.4e-4, versions=NEW | {"tokamax": "0.0.17"}),
    record("tokamax v2", "qwen3", "d_rhs", "v5e", why="too large"),
    record("ours", "mixtral", "forward", "v5e", 3e-3, dtype="int8", versions=OURS),
]
TABLE = """\
| problem | form | chip | roofline | ours | megablox | tokamax v2 | ours / best peer |
| --- | --- | --- | --: | --: | --: | --: | --: |
| qwen3 | rows | v6e | 302 | 320 | 400 | 640 | 0.80 |
| qwen3 | contraction | v5e | 604 | - | - | fails | - |
| mixtral | rows, int8 | v5e | 2442 | 3000 | - | - | - |

2026-01-02. jax 0.10.2, libtpu 0.0.42.1: ours, megablox; jax 0.12.0, libtpu 0.0.50.1: tokamax v2 0.0.17."""


def test_the_table_of_schedules(tmp_path):
    results = Results(command="tpu", environment={"date": "2026-01-02"}, records=RECORDS)
    assert tpu_table.markdown(results) == TABLE
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tpu_table.BEGIN}\nold\n{tpu_table.END}\nafter\n")
    for _ in range(2):  # in place, and again
        assert tpu_table.renew(page, TABLE)
        assert page.read_text() == f"before\n{tpu_table.BEGIN}\n\n{TABLE}\n\n{tpu_table.END}\nafter\n"
    page.write_text("no marks")
    assert not tpu_table.renew(page, TABLE) and page.read_text() == "no marks"


def test_the_table_on_the_page_is_that_of_the_results():
    results = Results.read(max((RESULTS / "tpu-schedule").glob("*.json")))
    assert tpu_table.markdown(results) in (ROOT / "docs" / "performance" / "tpu.md").read_text()


def test_the_table_says_how_two_cores_are_timed():
    results = Results(
        command="tpu", environment={"date": "d"}, records=[record("ours", "qwen3", "forward", "v5p", 1.0)]
    )
    assert tpu_table.markdown(results).endswith(tpu_table.TWO_CORES)


def test_the_cases_of_schedules():
    cases = tpu_table.cases()
    assert len(cases) == len(set(cases)) == 3 * 4 * 3 + 2
    some = tpu_table.cases("qwen3-tpu,mixtral-tpu", "forward", "v6e")
    assert [(case.problem.name, case.dtype) for case in some] == [
        ("qwen3-tpu", "bf16"), ("mixtral-tpu", "bf16"), ("mixtral-tpu", "int8"),
    ]  # fmt: skip
    assert tpu_table.cases(generations="none") == []
    with pytest.raises(UnknownName, match="generations: v9 not among v5e"):
        tpu_table.cases(generations="v9")
    assert tpu_table.Case.of(RECORDS[0]).problem is PROBLEMS["qwen3-tpu"]
