"""The contenders on TPU, for the compiler's schedule alone: nothing runs on a device.

Each is a function of the same operands, in the passes of `peers.py`, and is called the way its own project calls it;
d_lhs is measured for ours alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import trencadis
from benchmarks.peers import LAX_DIMS
from benchmarks.problems import PASSES
from benchmarks.tpu_table import Case

Tiling = tuple[int, int, int]  # of m, k and n
OUT = {"bf16": jnp.bfloat16, "int8": jnp.int32}
IN = {"bf16": jnp.bfloat16, "int8": jnp.int8}


def operands(case: Case) -> tuple[Any, Any, Any]:
    """The shapes of both operands, and the group sizes with their values, which the schedule depends on."""
    p, dtype = case.problem, IN[case.dtype]
    lhs, rhs, ct = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((p.m, p.k), (p.g, p.k, p.n), (p.m, p.n)))
    first, second = {"forward": (lhs, rhs), "d_lhs": (ct, rhs), "d_rhs": (lhs, ct)}[case.which]
    return first, second, p.group_sizes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuPeer:
    """A contender: `build(case, tiling)` gives the function; a tiling of None is the contender's own choice."""

    name: str
    build: Callable[[Case, Tiling | None], Callable[..., Any]]
    package: str  # whose version is noted
    tilings: Callable[[Case], tuple[Tiling | None, ...]] = lambda _: (None,)  # the best of these counts
    passes: tuple[str, ...] = ("forward", "d_rhs")
    dtypes: tuple[str, ...] = ("bf16",)

    def takes(self, case: Case) -> bool:
        """True if the contender has this pass in this dtype."""
        return case.which in self.passes and case.dtype in self.dtypes

    def version(self) -> str | None:
        """The version of its package, or None where that is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


# ---------------------------------------------------------------------------------------------------------------------
# Contenders


def _ours(case: Case, tiling: Tiling | None) -> Callable[..., Any]:
    out = OUT[case.dtype]
    if case.which == "d_rhs":
        return lambda a, b, s: trencadis.transposed_grouped_matmul(a, b, s, out, tiling, transpose_lhs=True)
    return lambda a, b, s: trencadis.grouped_matmul(a, b, s, out, tiling, transpose_rhs=case.which == "d_lhs")


def _ragged_dot(case: Case, tiling: Tiling | None) -> Callable[..., Any]:
    del tiling
    dims = LAX_DIMS[case.which]
    return lambda a, b, s: lax.ragged_dot_general(a, b, s, dims, preferred_element_type=OUT[case.dtype])


def _megablox(case: Case, tiling: Tiling | None) -> Callable[..., Any]:
    kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    out, tiles = OUT[case.dtype], tiling or (128, 128, 128)
    if case.which == "d_rhs":
        return lambda a, b, s: kernels.tgmm(a.T, b, s, out, tiles)
    return lambda a, b, s: kernels.gmm(a, b, s, out, tiles)


def _tokamax(case: Case, tiling: Tiling | None) -> Callable[..., Any]:
    # its op asks for the device that it runs on; so these are the kernels that the op would call, as it calls them
    rows = importlib.import_module("tokamax._src.ops.gmm_v2.gmm_v2")
    summed = importlib.import_module("tokamax._src.ops.gmm_v2.tgmm_v2")
    out, (tm, tk, tn) = OUT[case.dtype], tiling or (0, 0, 0)
    sizes = tiling and rows.TileSizes(tile_m=tm, tile_k=tk, tile_n=tn, bucket_base=128)  # as its own choice has it
    if case.which == "d_rhs":
        tiles = sizes or summed.calculate_tgmm_tiling
        return lambda a, b, s: summed.tgmm_v2(a, b, s, case.problem.g, tile_info=tiles, preferred_element_type=out)
    return lambda a, b, s: rows.gmm_v2(
        a, b, s, tile_info=sizes or rows.calculate_tiling, preferred_element_type=out,
        maybe_quantize_lhs=False, zero_initialize=False,
    )  # fmt: skip


def _maxtext_kernels() -> tuple[Any, Any]:
    """The two kernel modules of MaxText, without the packages around them, which would import all of it."""
    found = importlib.util.find_spec("maxtext")
    root = pathlib.Path(found.origin).parent if found and found.origin else pathlib.Path()
    name = ""
    for part in ("maxtext", "kernels", "megablox"):
        name, root = f"{name}.{part}".strip("."), root if part == "maxtext" else root / part
        package = types.ModuleType(name)
        package.__path__ = [str(root)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=str(root / "__init__.py"))
        sys.modules.setdefault(name, package)
    rows, summed = (importlib.import_module(f"{name}.pallas_mosaic_tpu_v2_{k}_kernel") for k in ("gmm", "tgmm"))
    return rows, summed


def _maxtext(case: Case, tiling: Tiling | None) -> Callable[..., Any]:
    rows, summed = _maxtext_kernels()
    out, (tm, tk, tn) = OUT[case.dtype], tiling or (0, 0, 0)
    sizes = tiling and rows.TileSizes(tile_m=tm, tile_k=tk, tile_n=tn)
    if case.which == "d_rhs":
        tiles = sizes or summed.calculate_tgmm_tiling
        return lambda a, b, s: summed.tgmm_v2(a, b, s, case.problem.g, tile_info=tiles, preferred_element_type=out)
    return lambda a, b, s: rows.gmm_v2(a, b, s, tile_info=sizes or rows.calculate_tiling, preferred_element_type=out)


# ---------------------------------------------------------------------------------------------------------------------
# Tilings: the best of a search by the same measure, for each problem, pass and generation

Found = Mapping[tuple[str, str], Mapping[str, Tiling]]

MEGABLOX: Found = {
    ("mixtral-tpu", "forward"): {
        "v5e": (256, 4096, 512), "v5p": (128, 4096, 512), "v6e": (512, 4096, 1024), "v7x": (256, 4096, 1024),
    },
    ("mixtral-tpu", "d_rhs"): {
        "v5e": (256, 1024, 1024), "v5p": (256, 1024, 1024), "v6e": (512, 1024, 2048), "v7x": (512, 1024, 2048),
    },
    ("dsv3-tpu", "forward"): {
        "v5e": (128, 7168, 256), "v5p": (128, 7168, 256), "v6e": (256, 7168, 512), "v7x": (256, 7168, 512),
    },
    ("dsv3-tpu", "d_rhs"): {
        "v5e": (128, 1792, 1024), "v5p": (128, 1792, 1024), "v6e": (256, 1024, 2048), "v7x": (256, 1024, 2048),
    },
    ("qwen3-tpu", "forward"): {
        "v5e": (256, 2048, 768), "v5p": (256, 2048, 384), "v6e": (512, 2048, 768), "v7x": (256, 2048, 768),
    },
    ("qwen3-tpu", "d_rhs"): {
        "v5e": (128, 2048, 768), "v5p": (128, 2048, 768), "v6e": (256, 2048, 768), "v7x": (256, 2048, 768),
    },
}  # fmt: skip
# beside its own choice, which leaves no room for spilled registers here
TOKAMAX: Found = {
    ("dsv3-tpu", "forward"): {"v5e": (256, 7168, 2048), "v5p": (256, 7168, 1024), "v6e": (256, 7168, 2048)}
}
# beside its own choice, where the search found a better one
MAXTEXT: Found = {
    ("mixtral-tpu", "forward"): {"v6e": (512, 4096, 3584), "v7x": (256, 4096, 2048)},
    ("mixtral-tpu", "d_rhs"): {"v6e": (512, 4096, 2048), "v7x": (512, 2048, 2048)},
    ("dsv3-tpu", "forward"): {"v6e": (256, 7168, 2048), "v7x": (256, 7168, 1024)},
    ("dsv3-tpu", "d_rhs"): {"v6e": (512, 1792, 2048), "v7x": (512, 1792, 2048)},
    ("qwen3-tpu", "forward"): {"v5e": (256, 2048, 768), "v6e": (256, 2048, 768), "v7x": (256, 2048, 768)},
}


def _of(found: Found, *own: None) -> Callable[[Case], tuple[Tiling | None, ...]]:
    """A function from a case to its tilings: the peer's own choice if it has one, and what the search found."""

    def tilings(case: Case) -> tuple[Tiling | None, ...]:
        best = found.get((case.problem.name, case.which), {}).get(case.generation)
        return own if best is None else (*own, best)

    return tilings


PEERS = {
    peer.name: peer
    for peer in (
        TpuPeer(name="ours", build=_ours, package="trencadis", passes=PASSES, dtypes=tuple(IN)),
        TpuPeer(name="ragged_dot", build=_ragged_dot, package="jax"),
        TpuPeer(name="megablox", build=_megablox, package="jax", tilings=_of(MEGABLOX)),
        TpuPeer(name="megablox 128³", build=_megablox, package="jax"),
        TpuPeer(name="tokamax v2", build=_tokamax, package="tokamax", tilings=_of(TOKAMAX, None)),
        TpuPeer(name="MaxText v2", build=_maxtext, package="maxtext", tilings=_of(MAXTEXT, None)),
    )
}
