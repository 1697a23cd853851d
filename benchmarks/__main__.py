"""The command line of the benchmarks: `python -m benchmarks {run,gpu,tpu,quant,ragged,moe,check,compile,plot} --help`.

Only light modules are imported before the arguments are read: pinning to a core, and choosing a platform, must come
before numpy and jax are imported. The module of a command is imported after that.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TypeAlias

from benchmarks import problems, timing

ROOT = pathlib.Path(__file__).parents[1]
GENERATIONS = "v5e,v5p,v6e,v7x"
FOUND = "default: results/<device>/<date>-<command>.json; 'none' writes nothing"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure trencadis and its peers.")
    commands = ask.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_run, _gpu, _tpu, _quant, _ragged, _moe, _check, _compile, _plot):
        add(commands)
    return ask


def _command(commands: Commands, name: str, help: str, *, json: bool = True) -> argparse.ArgumentParser:
    ask = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    if json:
        ask.add_argument("--json", metavar="PATH", help=FOUND)
    return ask


def _problems(ask: argparse.ArgumentParser, passes: str) -> None:
    ask.add_argument("--problems", metavar="A,B", help="names, as `run --list` prints them")
    ask.add_argument("--passes", metavar="P,P", help=f"of forward, d_lhs, d_rhs{passes}")


def _pin(ask: argparse.ArgumentParser, rounds: int) -> None:
    ask.add_argument("--pin", type=int, metavar="CORE", help="one core, CPU time; otherwise all cores, wall time")
    ask.add_argument("--rounds", type=int, default=rounds, help="turns of each contender (default: %(default)s)")


def _run(commands: Commands) -> None:
    ask = _command(commands, "run", "race ours against the peers on the problems of this platform")
    _problems(ask, " and step; default: the first three in a race on a CPU, else all")
    _pin(ask, 7)
    ask.add_argument("--tag", choices=problems.TAGS, help="all problems with this tag; default: the platform's")
    ask.add_argument("--dtypes", metavar="D,D", help="of f32, bf16; default: both on a CPU, else bf16")
    ask.add_argument("--peers", metavar="P,P", help="default: all that can run; ours always takes part")
    ask.add_argument("--budget", type=float, default=10.0, metavar="S",
                     help="seconds of turns that a slow contender gets (default: %(default)s)")  # fmt: skip
    ask.add_argument("--bursts", action="store_true", help="a few calls of each contender instead of a race")
    ask.add_argument("--alone", action="store_true",
                     help="each contender in a process of its own, call after call, on all cores")  # fmt: skip
    ask.add_argument("--scaling", action="store_true", help="time against g and against m instead of the problems")
    ask.add_argument("--memory", action="store_true", help="temporary bytes too, as the compiler counts them")
    ask.add_argument("--list", action="store_true", help="print the problems and stop")


def _gpu(commands: Commands) -> None:
    ask = _command(commands, "gpu", "time ours and the peers on an NVIDIA GPU in bf16, a burst of calls each")
    _problems(ask, " and step; default: all")
    ask.add_argument("--tag", choices=problems.TAGS, default="gpu", help="default: %(default)s")
    ask.add_argument(
        "--peers", metavar="P,P", help="default: torch,mgpu,tokamax; ours and dense always take part; also triton"
    )
    ask.add_argument("--formats", metavar="F,F", help="also the forward pass in these formats, such as e4m3")
    ask.add_argument("--jobs", type=int, default=8, help="functions compiled at a time (default: %(default)s)")
    ask.add_argument("--layouts", nargs="+", metavar="FIELDS",
                     help='time these layouts of one kernel instead, as "" "stages=3 store_buffers=4"')  # fmt: skip
    ask.add_argument("--format", default="bf16", help="of the operands, with --layouts (default: %(default)s)")
    ask.add_argument("--backend", choices=("gpu", "triton"), default="gpu",
                     help="whose layouts they are, with --layouts (default: %(default)s)")  # fmt: skip


def _tpu(commands: Commands) -> None:
    ask = _command(commands, "tpu", "time ours and the peers by the TPU compiler's own schedules; no TPU is needed")
    _problems(ask, "; default: all")
    ask.add_argument(
        "--generations", default=GENERATIONS, metavar="G,G", help="default: %(default)s; none: nothing new"
    )
    ask.add_argument("--peers", metavar="P,P", help="default: ours and all that can be imported")
    ask.add_argument("--python", action="append", default=[], metavar="PATH",
                     help="another interpreter too, with other versions or peers: all that it can import")  # fmt: skip
    ask.add_argument("--reuse", type=pathlib.Path, action="append", default=[], metavar="JSON",
                     help="take from there what is not compiled now, such as the peers with --peers ours")  # fmt: skip
    ask.add_argument("--timeout", type=float, default=300, metavar="S", help="per compile (default: %(default)s)")
    ask.add_argument("--page", type=pathlib.Path, default=ROOT / "docs" / "performance" / "tpu.md",
                     help="renew the table in this page (default: docs/performance/tpu.md), or in none")  # fmt: skip


def _quant(commands: Commands) -> None:
    ask = _command(commands, "quant", "time quantized operands, or measure their errors")
    ask.add_argument("--device", choices=("cpu", "gpu", "tpu"), default="cpu", help="tpu: by the compiler's schedules")
    ask.add_argument("--errors", choices=("formats", "gradients"), help="errors against float64 instead of times")
    _problems(ask, "; default: all that a format has")
    ask.add_argument("--tag", choices=problems.TAGS, help="all problems with this tag, such as gpu-drawn")
    ask.add_argument("--formats", metavar="F,F", help="default: all that the device has kernels for")
    ask.add_argument("--generations", default=GENERATIONS, metavar="G,G", help="of TPU (default: %(default)s)")
    ask.add_argument("--jobs", type=int, default=4, help="processes that compile at a time, on a GPU")
    _pin(ask, 7)


def _ragged(commands: Commands) -> None:
    ask = _command(commands, "ragged", "race grouped_gemm against a numpy loop on groups that differ in m, k and n")
    ask.add_argument("--device", choices=("cpu", "gpu"), default="cpu",
                     help="gpu: bf16 with traced sizes alone, also of larger groups, by bursts")  # fmt: skip
    _pin(ask, 9)


def _moe(commands: Commands) -> None:
    ask = _command(commands, "moe", "time the MoE layer, the sum of its grouped matmuls, and the peers' layers")
    ask.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="gpu: layers of known models, decode too")
    ask.add_argument("--shapes", metavar="S,S", help="default: all of the device; further: gpt-oss-120b-biases")
    ask.add_argument("--peers", metavar="P,P", help="default: torch,composed on a GPU, ragged_dot on a CPU")
    ask.add_argument("--jobs", type=int, default=16, help="processes that compile at a time, on a GPU; 0: this one")
    _pin(ask, 7)


def _check(commands: Commands) -> None:
    ask = _command(commands, "check", "compare the kernels with float64, by value; nothing is timed")
    ask.add_argument("--device", choices=("cpu", "gpu"), default="gpu", help="default: %(default)s")
    ask.add_argument("--backend", help="default: gpu, or xla on a CPU; triton: the kernels of every other GPU")
    ask.add_argument("--quick", action="store_true", help="leave out the large cases")
    ask.add_argument("--only", default="", metavar="WORDS", help="cases whose names contain this")
    ask.add_argument("--jobs", type=int, default=8, help="processes; 0: this one (default: %(default)s)")


def _compile(commands: Commands) -> None:
    ask = _command(commands, "compile", "time the compilation of a product or of a stack of layers, in fresh processes")
    _problems(ask, "; default: all")
    ask.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: %(default)s")
    ask.add_argument("--tag", choices=problems.TAGS, default="cpu", help="default: %(default)s")
    ask.add_argument("--peers", metavar="P,P", help="besides ours; of a stack triton and ragged_dot")
    ask.add_argument("--dtype", choices=("f32", "bf16"), default="bf16", help="default: %(default)s")
    ask.add_argument("--layers", type=int, nargs="+", metavar="N",
                     help="stacks of so many layers of three products, with gradients, not single passes")  # fmt: skip


def _plot(commands: Commands) -> None:
    ask = _command(commands, "plot", "draw files of results as SVG", json=False)
    ask.add_argument("results", nargs="+", type=pathlib.Path)
    ask.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/img"), help="default: %(default)s")


def prepare(asked: argparse.Namespace | SimpleNamespace) -> None:
    """Pin the process and choose the platform of jax, before anything imports numpy or jax."""
    if getattr(asked, "pin", None) is not None:
        timing.pin(asked.pin)
    device = "gpu" if asked.command == "gpu" else getattr(asked, "device", None)
    if device == "gpu":
        os.environ["JAX_PLATFORMS"] = "cuda"
    elif device or asked.command in ("tpu", "plot"):  # the TPU compiler runs on the host
        os.environ["JAX_PLATFORMS"] = "cpu"
    timing.default_platform()
    if asked.command in (
        "quant",
        "moe",
        "check",
        "compile",
    ):  # children measure; this process must leave them the memory of the GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 1 if one of our own results is missing or wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    asked = parser().parse_args(words)
    asked.words = words
    if getattr(asked, "alone", False) and asked.pin is not None:
        parser().error("--alone: want all cores; got --pin")
    if getattr(asked, "list", False):
        print(*problems.PROBLEMS.values(), sep="\n")
        return 0
    prepare(asked)
    try:
        return importlib.import_module(f"benchmarks.commands.{asked.command}").main(asked)
    except problems.UnknownName as mistake:
        parser().error(str(mistake))


if __name__ == "__main__":
    sys.exit(main())
