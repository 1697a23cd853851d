"""What `gpu` measures, and in which process; nothing is measured here."""

import pytest

from benchmarks import __main__ as command_line
from benchmarks import formats, layouts, problems, torch_peer
from benchmarks.commands import gpu
from benchmarks.report import Record


@pytest.fixture
def saw(monkeypatch):
    """The calls of what would take a GPU."""
    found = {}
    monkeypatch.setenv("JAX_PLATFORMS", "")

    def torch(chosen, passes):
        found["torch"] = ([p.name for p in chosen], passes)
        return [Record(problem="decode-128", dtype="bf16", which="forward", contender="torch", why="is not installed")]

    def other(cases, jobs):
        found["formats"] = cases, jobs
        return [Record(problem="decode-128", dtype="e4m3", which="forward")]

    def all_of_it(results, keep, chosen, dtypes, passes, contenders, how):
        found["run"] = (dtypes, passes, [peer.name for peer in contenders], how.bursts, how.jobs)
        found["records"] = list(results.records)
        return 0

    monkeypatch.setattr(torch_peer, "records", torch)
    monkeypatch.setattr(formats, "records", other)
    monkeypatch.setattr(gpu, "measure_all", all_of_it)
    monkeypatch.setattr(
        layouts, "main", lambda asked, chosen, passes: found.update(layouts=(asked.layouts, passes)) or 0
    )
    return found


def test_peers_and_formats(saw, capsys):
    words = ["gpu", "--problems", "decode-128", "--peers", "torch,mgpu8", "--formats", "e4m3", "--json", "none"]
    assert command_line.main(words) == 0
    passes = [*problems.PASSES, "step"]
    assert saw["torch"] == (["decode-128"], passes)
    assert saw["formats"] == ([("decode-128", "forward", "e4m3")], 8)
    assert saw["run"] == (["bf16"], passes, ["ours", "dense", "mgpu8"], True, 8)
    assert [r.contender for r in saw["records"]] == ["torch", "ours"]
    assert "torch is not installed" in capsys.readouterr().out


def test_all_named_problems_by_default(saw):
    assert command_line.main(["gpu", "--json", "none"]) == 0
    assert saw["torch"][0] == [p.name for p in problems.GPU] and "formats" not in saw
    assert saw["run"][2] == ["ours", "dense", "mgpu8", "mgpu4", "tokamax"]


def test_layouts(saw):
    assert command_line.main(["gpu", "--problems", "decode-128", "--layouts", "", "stages=3"]) == 0
    assert saw == {"layouts": (["", "stages=3"], list(problems.PASSES))}
