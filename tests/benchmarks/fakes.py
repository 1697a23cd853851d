"""A tiny problem and clocks that do not run: nothing is timed in the tests of the benchmarks."""

from benchmarks import problems

TINY = problems.BenchProblem(name="tiny", m=20, k=8, n=6, g=4, sizes="zipf-empties", seed=3)


class FakeClock:
    """Each call takes what its table says, in turn; then the last entry, for ever."""

    name, settle_s = "fake", 0.0

    def __init__(self, seconds):
        self.left = {name: list(values) for name, values in seconds.items()}
        self.order = []

    def __call__(self, call, repeats):
        name = call()
        self.order.append((name, repeats))
        return self.left[name].pop(0) if len(self.left[name]) > 1 else self.left[name][0]


class CountingClock:
    """Each call takes one second more than the one before."""

    name, settle_s = "fake", 0.0

    def __init__(self):
        self.last = 0

    def __call__(self, call, repeats):
        self.last += 1
        return float(self.last)
