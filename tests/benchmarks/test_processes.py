import os
import threading
import time

import pytest

from benchmarks import processes
from benchmarks.processes import ChildFailed, Job

COUNTS = "tests.benchmarks.jobs:counts"


def test_values_come_from_a_child_and_from_this_process():
    job = Job(function=COUNTS, arguments=([1, "a"], {"b": None}))
    want = [[1, {"b": None}], ["a", {"b": None}]]
    assert list(processes.run(job)) == list(processes.run(job, child=False)) == want


def test_a_child_that_fails_says_why_after_its_values():
    found = []
    with pytest.raises(ChildFailed, match="ValueError: want a number"):
        for value in processes.run(Job(function=COUNTS, arguments=([1, "raise"],))):
            found.append(value)
    assert found == [[1]]


@pytest.mark.parametrize("item, why", [("die", "exit code 3"), ("hang", "no answer within 2 s")])
def test_the_items_behind_a_failure_are_done_by_another_child(item, why):
    found = list(processes.each(COUNTS, ["a", item, "b"], 7, silence_s=2))
    assert found == [("a", ["a", 7], ""), (item, None, why), ("b", ["b", 7], "")]


def test_tasks_yield_in_order_and_hold_the_device_one_by_one(tmp_path):
    assert list(processes.in_parallel([lambda i=i: i for i in range(5)], workers=3)) == [0, 1, 2, 3, 4]
    mark = tmp_path / "inside"

    def task():
        with processes.alone():
            assert not mark.exists()
            mark.touch()
            time.sleep(0.01)
            mark.unlink()

    list(processes.in_parallel([task] * 4, workers=4))
    assert processes.LOCK not in os.environ


def test_nobody_is_beside_one_that_is_alone():
    """Several are inside together; one that is alone waits until they have left."""
    inside, lock = [], threading.Barrier(2, timeout=10)

    def beside():
        with processes.together():
            lock.wait()  # both are inside
            inside.append("beside")
            time.sleep(0.01)
            inside.remove("beside")
        with processes.alone():
            assert not inside
            inside.append("alone")
            time.sleep(0.01)
            inside.remove("alone")

    list(processes.in_parallel([beside] * 2, workers=2))
    assert not inside
