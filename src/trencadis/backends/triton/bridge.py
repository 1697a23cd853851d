"""From JAX to Triton: a kernel is compiled for an architecture, and called by the custom call that jaxlib has for it.

Everything that depends on the versions of Triton and of jaxlib is in this file. It needs no GPU: Triton compiles for
any architecture on any machine, and the message that jaxlib's custom call takes is written here, field by field, since
jaxlib's own writer comes only with its plugins for GPUs (ADR 0035). Written for Triton 3.6 and jax 0.10.2 to 0.12.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import triton
import triton.language as tl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trencadis.core.jax_compat import IrValue, lower_triton_call

TYPES = {
    "bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32, "int8": tl.int8, "int32": tl.int32,
    "uint8": tl.uint8, "float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5,
}  # fmt: skip
ALIGNMENT = 16  # bytes: XLA aligns every array to more than this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel with all of its constants, for one architecture: what it is compiled from."""

    function: Any  # a function under `triton.jit`
    pointers: tuple[tuple[str, str], ...]  # the name and the dtype of each array, in the order of the call
    constants: tuple[tuple[str, Any], ...]
    arch: str  # "9.0", a compute capability of CUDA, or "gfx942"
    warps: int
    stages: int
    scratch: int = 0  # bytes of memory for each program beside the arrays, in which it writes descriptors of copies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """What the compiler made of a kernel: its assembly, or on AMD the path of its binary, and what a launch needs."""

    name: str
    text: str  # PTX, or GCN assembly
    image: str  # what the custom call takes: PTX, or the path of a code object
    shared: int  # bytes of shared memory
    threads_per_warp: int


_one_compiler = threading.Lock()


def compiled(kernel: Kernel) -> Binary:
    """A kernel, compiled once in a process; Triton keeps what it has compiled on disk too."""
    with _one_compiler:  # two threads that want the same kernel compile it once
        return _compiled(kernel)


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: Kernel) -> Binary:
    names, dtypes, constants = kernel.function.arg_names, dict(kernel.pointers), dict(kernel.constants)
    signature = {name: f"*{TYPES[dtypes[name]].mangle()}" if name in dtypes else "constexpr" for name in names}
    absent = {name: constants.get(name) for name in names if name not in dtypes}  # arrays that are not there are None
    aligned = {(i,): [["tt.divisibility", ALIGNMENT]] for i, name in enumerate(names) if name in dtypes}
    source = ASTSource(kernel.function, signature, absent, aligned)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    done = triton.compile(source, target=gpu_target(kernel.arch), options=options)
    if getattr(done.metadata, "global_scratch_size", 0) > kernel.scratch:
        raise NotImplementedError(f"{done.metadata.name} needs memory that this call does not give it")
    text = done.asm["amdgcn" if "gfx" in kernel.arch else "ptx"]
    image = _on_disk(done.asm["hsaco"]) if "gfx" in kernel.arch else text
    return Binary(
        name=done.metadata.name, text=text, image=image, shared=done.metadata.shared,
        threads_per_warp=gpu_target(kernel.arch).warp_size,
    )  # fmt: skip


def gpu_target(arch: str) -> GPUTarget:
    """The target of Triton for a compute capability of CUDA, such as "9.0", or an architecture of AMD."""
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch.replace(".", "")), 32)


def _on_disk(image: bytes) -> str:
    """The path of a file with a code object: jaxlib for ROCm reads it from there."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"trencadis-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(image).hexdigest()}.hsaco"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(image)
        part.replace(path)
    return str(path)


# ---------------------------------------------------------------------------------------------------------------------
# The message of the custom call: jaxlib's TritonAnyKernelCall, a protocol buffer


def _varint(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a message: an integer, which is left out if it is 0, or a string or a message by its bytes."""
    if isinstance(value, int):
        return bytes((*_varint(number << 3), *_varint(value))) if value else b""
    value = value.encode() if isinstance(value, str) else value
    return bytes((*_varint(number << 3 | 2), *_varint(len(value)))) + value if value else b""


def message(kernel: Kernel, binary: Binary, grid: int, arrays: int) -> bytes:
    """The launch of a kernel with `arrays` arrays, in `grid` programs, as jaxlib's custom call reads it."""
    cuda = 0 if "gfx" in kernel.arch else int(kernel.arch.replace(".", ""))
    code = (
        _field(1, binary.name) + _field(2, kernel.warps) + _field(3, binary.shared) + _field(4, binary.image)
        + _field(6, cuda) + _field(10, 1)
    )  # fmt: skip
    array = _field(5, _field(1, _field(2, ALIGNMENT)))
    launch = _field(1, code) + _field(2, grid) + _field(3, 1) + _field(4, 1) + array * arrays
    return _field(1, launch) + _field(4, f"trencadis_{binary.name}")


# ---------------------------------------------------------------------------------------------------------------------
# The primitive

triton_call_p = Primitive("trencadis_triton")


def call(
    kernel: Kernel, grid: int, operands: Sequence[jax.Array], out: jax.ShapeDtypeStruct, *, alias: int | None = None
) -> jax.Array:
    """The array that a kernel writes, from its operands; it has the memory of operand `alias` if there is one."""
    return call_for_several(kernel, grid, operands, (out,), alias=alias)[0]


def call_for_several(
    kernel: Kernel, grid: int, operands: Sequence[jax.Array], outs: Sequence[jax.ShapeDtypeStruct], *,
    alias: int | None = None,
) -> list[jax.Array]:  # fmt: skip
    """The arrays that a kernel writes; the first has the memory of operand `alias` if there is one."""
    if not 0 < grid < 2**31:
        raise ValueError(f"a kernel has 1 to 2**31 - 1 programs; got {grid}")
    return triton_call_p.bind(*operands, kernel=kernel, grid=grid, outs=tuple(outs), alias=alias)[: len(outs)]


def _types(*_: Any, kernel: Kernel, grid: int, outs: Sequence[jax.ShapeDtypeStruct], **__: Any) -> list[Any]:
    """The results, and the memory for descriptors: Triton's parameter for it comes after those of the arrays."""
    types = [jax.core.ShapedArray(out.shape, out.dtype) for out in outs]
    if kernel.scratch:
        types.append(jax.core.ShapedArray((grid * kernel.scratch,), jax.numpy.uint8))
    return types


triton_call_p.multiple_results = True
triton_call_p.def_abstract_eval(_types)


def _lower(
    context: mlir.LoweringRuleContext, *operands: IrValue, kernel: Kernel, grid: int, alias: int | None, **_: Any
) -> Sequence[IrValue]:
    """The custom call of a kernel, which is compiled here."""
    packed = zlib.compress(message(kernel, compiled(kernel), grid, len(operands) + len(context.avals_out)))
    return lower_triton_call(context, operands, packed, {} if alias is None else {alias: 0})


for _platform in ("cuda", "rocm"):
    mlir.register_lowering(triton_call_p, _lower, platform=_platform)
