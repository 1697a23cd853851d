"""Compile a function for a TPU on a machine that has none.

The function is traced and lowered here, for the chip that is asked for, and compiled in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from trencadis.core.devices import Chip
from trencadis.core.jax_compat import abstract_device

INSTALL = "pip install 'trencadis[tpu]', or in a checkout: pip install '.[tpu]'"

# What keeps libtpu quiet, off the network, and willing to be loaded by several processes at once.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_OPTIONS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_emit_annotations=true",
    "--xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static|post-delay-converter|packed-bundles-post-ra",
    # Operands stay in HBM: XLA could otherwise fetch a whole operand ahead, and the kernel's own copies would not show.
    "--xla_vf_vmem_memory_space_assignment=false",
    "--xla_gf_vmem_memory_space_assignment=false",
)
_NEWEST_FORM = "jax_export_ignore_forward_compatibility"


class CompilerMissing(ImportError):
    """The TPU compiler, libtpu, is not installed or does not start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler returned; the fields after `error` are empty if there is an error."""

    folder: pathlib.Path  # of its dump
    error: str | None
    kernels: tuple[dict[str, Any], ...] = ()  # name, body, sources of the operands, and those that are known already
    calls: tuple[dict[str, Any], ...] = ()  # body and known operands of each kernel call
    times: dict[str, int] = dataclasses.field(default_factory=dict)  # how often each instruction runs
    uncounted: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # what is in loops of unknown length
    notes: tuple[str, ...] = ()


def compile_for(
    chip: Chip, fn: Callable[..., Any], args: Sequence[Any], folder: pathlib.Path, *, timeout: float
) -> Compiled:
    """Compile a call for one device of a chip, and keep the compiler's dump in a folder."""
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerMissing(f"the TPU compiler, libtpu, is not installed; install it with: {INSTALL}")
    exported, known = export_for(chip, fn, args)
    dump = folder / "dump"
    dump.mkdir(parents=True, exist_ok=True)
    for old in (folder / "answer.json", folder / "compiling", *dump.glob("*-final_bundles.txt")):
        old.unlink(missing_ok=True)  # of another call: what is read below is of this one
    (folder / "log").mkdir(exist_ok=True)
    (folder / "question.json").write_text(json.dumps({"topology": chip.topology}))
    (folder / "program.bin").write_bytes(exported.serialize())
    np.savez(folder / "known.npz", **{str(position): values for position, values in known.items()})
    done = subprocess.run(
        [sys.executable, "-m", "trencadis.inspect.worker", str(folder)],
        env=_environment(dump, folder / "log"), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    if not (folder / "answer.json").exists():
        return Compiled(folder=dump, error=_last_words(done, (folder / "compiling").exists()))
    answer = json.loads((folder / "answer.json").read_text())
    return Compiled(
        folder=dump,
        error=answer["error"],
        kernels=tuple(map(_numbered, answer["kernels"])),
        calls=tuple(map(_numbered, answer["calls"])),
        times=answer["times"],
        uncounted=answer["uncounted"],
        notes=() if answer["note"] is None else (answer["note"],),
    )


def _numbered(kernel: dict[str, Any]) -> dict[str, Any]:
    """A kernel read from JSON, with the numbers of its known operands as integers again."""
    return {**kernel, "values": {int(i): values for i, values in kernel["values"].items()}}


def export_for(chip: Chip, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
    """The call lowered for a chip, and those integer arguments that have values, by position."""
    leaves, tree = jax.tree.flatten(tuple(args))
    known = {i: np.asarray(x) for i, x in enumerate(leaves) if _has_integers(x)}
    shapes = jax.tree.unflatten(tree, [_shape(x) for x in leaves])
    jitted = jax.jit(fn)
    with abstract_device(chip.kind, chip.cores), _this_version_only():
        try:
            exported = export.export(jitted, platforms=["tpu"])(*shapes)
        except ValueError as error:
            if "custom call" not in str(error):
                raise
            # Export refuses calls that a later XLA may not know. This one is compiled at once, by the same version.
            text = jitted.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
            targets = sorted(set(re.findall(r"custom_call @([\w.$]+)", text)))
            allowed = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
            exported = export.export(jitted, platforms=["tpu"], disabled_checks=allowed)(*shapes)
    if exported.nr_devices != 1:
        raise ValueError(f"fn: want a function for one device; this one is sharded over {exported.nr_devices}")
    return exported, {i: x.astype(exported.in_avals[i].dtype) for i, x in known.items()}


@contextlib.contextmanager
def _this_version_only() -> Iterator[None]:
    """A context in which export writes for this compiler alone, which reads it at once.

    By default it writes kernels in an older form, for older compilers. That is not what a call would compile.
    """
    before = getattr(jax.config, _NEWEST_FORM)
    jax.config.update(_NEWEST_FORM, True)
    try:
        yield
    finally:
        jax.config.update(_NEWEST_FORM, before)


def _has_integers(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct) or not (np.isscalar(x) or hasattr(x, "__array__")):
        return False
    return jnp.result_type(x).kind in "biu"


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))


def _environment(dump: pathlib.Path, log: pathlib.Path) -> dict[str, str]:
    package = str(pathlib.Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **ENVIRONMENT,
        "LIBTPU_INIT_ARGS": " ".join([f"--xla_jf_dump_to={dump}", *_OPTIONS]),
        "PYTHONPATH": os.pathsep.join(paths),
        "TPU_LOG_DIR": str(log),
        "TMPDIR": str(log),  # libtpu writes logs there too
    }


def _last_words(done: subprocess.CompletedProcess[str], compiling: bool) -> str:
    """The message of a compiler that crashed; anything else that left no answer is raised."""
    lines = (done.stderr + done.stdout).strip().splitlines()
    if compiling and done.returncode < 0:
        told = [line for line in lines if re.search(r"Check fail|[Ee]rror|F\d{4}", line)] or lines
        return f"the compiler crashed (signal {-done.returncode}): " + " ".join(told[:3])[:1000]
    tail = "\n".join(lines[-12:])
    raise CompilerMissing(f"the TPU compiler did not start; is it properly installed? {INSTALL}\n{tail}")
