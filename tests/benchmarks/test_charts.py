import pytest

from benchmarks import charts


def test_axes():
    axis = charts.log_axis([0.1, 10])
    assert axis.share(1) == pytest.approx(0.5) and [tick for tick, _ in axis.ticks] == [0.1, 0.2, 0.5, 1, 2, 5, 10]
    assert [words for _, words in charts.log_axis([0.02, 4000]).ticks] == ["0.1", "1", "10", "100", "1,000"]
    assert axis.share(1e-9) == 0 and axis.share(1e9) == 1
    linear = charts.linear_axis([130, 791], 200)
    assert linear.share(400) == 0.5 and [words for _, words in linear.ticks] == ["0", "200", "400", "600", "800"]


@pytest.mark.parametrize("shape", ["disc", "ring", *charts.CORNERS])
def test_marks_say_what_they_are(shape):
    mark = charts.draw_mark(charts.Look("#000000", shape), 10, 20, "ours: 5 ms")
    assert "<title>ours: 5 ms</title>" in mark and "#000000" in mark


def test_every_contender_has_a_look_of_its_own():
    looks = [charts.LOOKS[name] for name in ("ours", "numpy", "dense", "ragged_dot")]
    assert len(set(looks)) == 4 and len({look.shape for look in looks}) == 4
