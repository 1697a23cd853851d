"""The same program over two processes: equal to the bit, and what happens to one when the other is killed."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from tests.parallel import cases, training

pytestmark = pytest.mark.core

ROOT = pathlib.Path(__file__).parents[2]
HEARTBEAT = 3


@pytest.fixture(scope="module")
def processes():
    """Two processes on this machine with two devices each: what they said, how they ended, and after how long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.parallel.training"]
    started = [
        subprocess.Popen(
            [*command, str(i), str(port), str(HEARTBEAT)],
            cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        second = started[1].communicate(timeout=120)
        began = time.monotonic()
        first = started[0].communicate(timeout=HEARTBEAT + 60)
        yield (*first, *second), [each.returncode for each in started], time.monotonic() - began
    finally:
        for each in started:
            each.kill()


def test_losses_are_equal_to_the_bit(processes):
    said, _, _ = processes
    steps = training.losses(cases.mesh_of(training.DEVICES))
    line = " ".join(["losses", *(next(steps) for _ in range(3))])
    assert line in said[0].splitlines(), said
    assert line in said[2].splitlines(), said


def test_a_killed_peer_ends_the_other_process(processes):
    said, (first, second), seconds = processes
    assert second < 0 and first != 0, said
    assert seconds < HEARTBEAT + 10
