import dataclasses

from benchmarks import problems, tables, timing
from benchmarks.report import Record, Results, cells
from benchmarks.timing import Stats


def test_tables(made, capsys):
    header, rows = tables.ratio_table(cells(made.records))
    assert header[-2:] == ["/ numpy", "/ dense"] and all(len(row) == len(header) for row in rows)
    tables.print_run(made)
    printed = capsys.readouterr().out
    assert "milliseconds (" in printed and "below 1 ours is faster" in printed
    assert "time grows as m^" in printed and "temporary memory, MiB" in printed
    assert tables.plain("t", (["a", "b"], [["xx", "y"]])) == "t\na   b\n--  -\nxx  y"
    assert tables.markdown((["a", "b"], [["xx", "y"]]), words=1) == "| a | b |\n| --- | --: |\n| xx | y |"


def test_rates_and_ratios():
    def record(which, contender, seconds):
        time = Stats(median=seconds) if seconds else None
        return Record(problem="tiny", dtype="f32", which=which, contender=contender, time=time)

    found = [record(which, name, 1.0) for which in problems.PASSES for name in ("ours", "dense")]
    found += [record("step", "ours", 1.0), record("forward", "torch", 0.5), record("d_lhs", "torch", None)]
    header, rows = tables.ratio_table(cells(found))
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert (table[0]["/ torch"], table[0]["/ dense"], table[0]["/ sum of passes"]) == ("2.000", "1.000", "-")
    assert (table[1]["/ torch"], table[1]["/ dense"]) == ("-", "1.000")
    assert (table[3]["/ dense"], table[3]["/ sum of passes"]) == ("-", "0.333")
    header, rows = tables.rates(cells(found), {"tiny": {"m": 10**6, "k": 10**3, "n": 10**3, "g": 1}})
    assert dict(zip(header, rows[0], strict=True)) | {} == {
        "problem": "tiny", "dtype": "f32", "pass": "forward", "ours": "2", "dense": "2", "torch": "4",
    }  # fmt: skip
    assert rows[3][3] == "6"  # a step has the FLOPs of three passes


def test_one_unit_in_a_table(capsys):
    """On a GPU decode problems are not among the TFLOP/s: they have a table in milliseconds."""
    shapes = {
        "large": {"m": 2**14, "k": 2**12, "n": 2**12, "g": 8},
        "decode": {"m": 64, "k": 2**12, "n": 2**12, "g": 8},
    }
    records = [
        Record(problem=p, dtype="bf16", which="forward", contender=c, time=Stats(median=t))
        for p in shapes for c, t in (("ours", 1e-3), ("torch", 2e-3))
    ]  # fmt: skip
    where = {"platform": "gpu", "device": "NVIDIA H200", "clock": "cupti kernel time"}
    tables.print_run(Results(command="gpu", environment=where, shapes=shapes, records=records))
    rates, decode, ratios = capsys.readouterr().out.split("problem ")[1:]
    assert "large" in rates and "550" in rates and "decode " not in rates.replace("decode problems", "")
    assert "decode" in decode and "large" not in decode and "0.500" in ratios


def test_marks_of_times():
    record = Record(problem="p", dtype="f32", which="d_lhs", time=timing.stats([1.0, 1.0, 3.0, 3.0]))
    few = dataclasses.replace(record, contender="few", time=timing.stats([1.0]))
    header, rows = tables.milliseconds(cells([record, few]))
    assert header == ["problem", "dtype", "pass", "ours", "few"] and rows == [["p", "f32", "d lhs", "2e+03~", "1e+03*"]]
