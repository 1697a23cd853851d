"""Train the model of `train_moe.py` over four devices, in one process and in two, and compare the losses to the bit.

    python examples/train_moe_processes.py [--steps 20]

Both processes run on this machine and have two virtual CPU devices each. On several machines, start
`train_moe.py --experts-over N --coordinator HOST:PORT --processes P --process I` on each of them. If a process is
killed, the others end, too, with a code that is not 0, at the latest when the heartbeat is missed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import subprocess
import sys

TRAIN = [sys.executable, str(pathlib.Path(__file__).with_name("train_moe.py")), "--quick", "--experts-over", "4"]


def started(*words: str) -> subprocess.Popen[str]:
    """A training process with further words on its command line."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([*TRAIN, *words], env=env, text=True, stdout=subprocess.PIPE)


def losses(*processes: subprocess.Popen[str]) -> list[str]:
    """What each process says of its losses, once all have ended."""
    said = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise SystemExit(f"a process ended with code {process.returncode}")
    return [line for text in said for line in text.splitlines() if line.startswith("losses to the bit")]


def main() -> None:
    ask = argparse.ArgumentParser(description="Train a small Mixture-of-Experts language model in two processes.")
    ask.add_argument("--steps", type=int, default=20)
    steps = ["--steps", str(ask.parse_args().steps)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process"]
    one = losses(started(*steps))
    two = losses(*(started(*steps, *where, str(i)) for i in range(2)))
    print("one process, four devices: ", *one)
    for line in two:
        print("one of two, with two each: ", line)
    assert set(one) == set(two), "the losses differ"
    print("equal to the bit")


if __name__ == "__main__":
    main()
