"""What `moe` measures on which device, and what it prints; nothing is measured here."""

import importlib.util

import pytest

from benchmarks import __main__ as command_line
from benchmarks import processes
from benchmarks.commands import moe
from benchmarks.moe import cpu, gpu, shapes
from benchmarks.processes import ChildFailed
from benchmarks.report import Record, Results
from benchmarks.timing import Stats


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def record(which, contender, ms, problem="sonic", **details):
    time = Stats(median=ms / 1e3)
    return Record(problem=problem, dtype="bf16", which=which, contender=contender, time=time, details=details)


RECORDS = [
    record("forward", "ours", 1.1), record("forward", "composed", 2.2), record("forward", "torch", 3.3),
    record("forward", "products", 1.0, seconds={"gate_up": 6e-4, "down": 4e-4}),
    record("gather", "ours", 0.01, bytes=4 * 10**7), record("copy", "ours", 0.01, bytes=5 * 10**7),
]  # fmt: skip


def test_tables(capsys):
    moe.show(Results(command="moe", environment={"clock": "fake"}, records=RECORDS))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sonic", "bf16", "forward", "1.100", "2.000", "3.000"] in lines
    assert ["sonic", "bf16", "forward", "0.6", "0.4"] in lines
    assert ["sonic", "bf16", "gather", "10.0", "40.0", "4.00", "0.80"] in lines


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that would have run; that of mixtral dies after its first record."""
    found = []

    def run(job, silence_s, child):
        found.append((job.function.partition(":")[0].rpartition(".")[2], *job.arguments))
        yield {"says": f"{job.arguments[0]}: compiled in 1 s"}
        yield record("forward", "ours", 1.0, job.arguments[0]).to_json()
        if job.arguments[0] == "mixtral":
            raise ChildFailed("exit code 139")

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return found


def test_a_process_for_each_shape(jobs, tmp_path, capsys):
    words = ["moe", "--device", "gpu", "--jobs", "2", "--json", str(tmp_path / "m.json")]
    assert command_line.main([*words, "--shapes", "mixtral,decode-mxfp4,sonic"]) == 1
    assert sorted(jobs, key=str) == sorted(
        [
            ("gpu", "mixtral", ["ours", "composed"]), ("gpu", "sonic", ["ours", "composed"]),
            ("gpu", "decode-mxfp4", ["ours"]), ("torch_layer", "mixtral"), ("torch_layer", "sonic"),
        ],
        key=str,
    )  # fmt: skip
    made = Results.read(tmp_path / "m.json")
    assert [r.problem for r in made.records] == [*["mixtral"] * 4, "decode-mxfp4", *["sonic"] * 2]
    assert sorted(r.contender for r in made.records if r.why == "failed: exit code 139") == ["ours", "torch"]
    printed = capsys.readouterr()
    assert "sonic: compiled in 1 s" in printed.out and "OURS failed: exit code 139 (mixtral" in printed.err


def test_all_shapes_of_a_gpu(jobs, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no torch
    assert command_line.main(["moe", "--device", "gpu", "--json", "none"]) == 1
    assert {name for _, name, _ in jobs} == {shape.name for shape in (*shapes.LAYERS, *shapes.DECODE)}
    assert {kind for kind, *_ in jobs} == {"gpu"}


def test_a_cpu(monkeypatch, tmp_path):
    def records(shape, peers, clock, rounds):
        assert (shape.name, peers, clock.name, rounds) == ("moe-cpu", ["ragged_dot"], "wall time", 7)
        yield record("step", "ours", 1.0, shape.name)

    monkeypatch.setattr(cpu, "records", records)
    assert command_line.main(["moe", "--json", str(tmp_path / "m.json")]) == 0
    made = Results.read(tmp_path / "m.json")
    assert made.shapes == {"moe-cpu": {"t": 4096, "k": 4, "d": 512, "f": 1024, "e": 32}} and len(made.records) == 1


def test_unknown_names(capsys):
    for words in (["--shapes", "nonsense"], ["--peers", "torch"]):
        with pytest.raises(SystemExit):
            command_line.main(["moe", *words, "--json", "none"])
    assert "torch not among ragged_dot, composed" in capsys.readouterr().err


def test_a_process_compiles_before_it_is_timed(monkeypatch):
    order = []

    class Prepared:
        def __init__(self, shape, names, threads):
            order.append(("compiled", shape.name))

        def make(self):
            order.append("made")
            return {}

    monkeypatch.setattr(gpu, "Prepared", Prepared)
    monkeypatch.setattr(gpu, "timed", lambda prepared, x, names: [record("forward", "ours", 1.0)])
    said, found = gpu.measure("sonic", ["ours"])
    assert order == [("compiled", "sonic"), "made"] and said["says"].startswith("sonic: compiled in")
    assert Record.from_json(found).seconds == 1e-3
