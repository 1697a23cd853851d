"""From JAX to the native kernels: the custom calls of the package `trencadis_cpu`, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import trencadis_cpu

from trencadis.backends.cpu.programs import Program
from trencadis.backends.prepare import flat_sizes
from trencadis.core.epilogue import Extras
from trencadis.core.problem import Form, Problem
from trencadis.core.tiling import Tiling

Array = jax.Array

INTERFACE = 2  # of the custom calls: a package with another one is older, or newer

_found = getattr(trencadis_cpu, "INTERFACE", None)
if _found != INTERFACE:
    raise ImportError(f"its custom calls have interface {_found}, and this version of trencadis wants {INTERFACE}")

INSTRUCTIONS: str = trencadis_cpu.INSTRUCTIONS  # that the kernels use here; empty if portable

try:
    for _name, _handler in trencadis_cpu.TARGETS.items():
        jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
except Exception as error:  # a jaxlib that does not know the interface that the package was built for
    raise ImportError(f"jaxlib does not take its kernels: {error}") from error


def call(
    name: str, operands: Sequence[Array], out: Any, attributes: dict[str, Any], aliases: dict[int, int] | None = None
) -> Any:
    """What a kernel writes from its operands: an array or a list of them, which may have the memory of operands.

    `out` is the shape and dtype of each, and `aliases` the number of a result by that of an operand.
    """
    kernel: Any = jax.ffi.ffi_call(f"trencadis_{name}", out, input_output_aliases=aliases)
    return kernel(*operands, **attributes)


def grouped(
    problem: Problem, tile: Tiling, operands: Sequence[Array], extras: Extras = Extras(), *,
    token: Array | None = None,
) -> Array:  # fmt: skip
    """The result of a problem without a gate, from lhs, rhs, group sizes, first group and the arrays of its epilogue.

    Args:
      problem: the problem. If its gate gathers rows, those of `token` are meant, of lhs or of rhs.
      tile: the largest tile of a thread.
      operands: lhs, rhs, group sizes and first group.
      extras: a bias, and an array to add to, whose memory is that of the result.
      token: i32[rows], the row of the operand that each row is, if they are gathered.
    """
    lhs, rhs, sizes, first = operands
    bias = None if extras.bias is None else extras.bias.astype(problem.acc)
    given = [x for x in (bias, extras.existing, token) if x is not None]
    gather = 0 if token is None or problem.gather is None else 1 + ("lhs", "rhs").index(problem.gather.operand)
    sides = (tile.m, tile.k, tile.n) if problem.form is Form.ROWS else (tile.k, tile.m, tile.n)  # of C
    attributes = {
        "contraction": problem.form is Form.CONTRACTION,
        "transpose_lhs": problem.transpose_lhs,
        "transpose_rhs": problem.transpose_rhs,
        "bias": bias is not None,
        "accumulate": extras.existing is not None,
        "gather": np.int64(gather),
        "rows": np.int64(problem.rows),
        "local": np.int64(problem.local_groups),
        "tile": np.array(sides, np.int64),
    }
    out = jax.ShapeDtypeStruct(problem.out_shape, problem.out)
    aliases = None if extras.existing is None else {4 + (bias is not None): 0}
    found: Array = call("grouped", [lhs, rhs, flat_sizes(sizes, problem.m), first, *given], out, attributes, aliases)
    return found


def fused(
    problem: Problem, tile: Tiling, program: Program, operands: Sequence[Array], *,
    second: Sequence[Array] = (), biases: Sequence[Array] = (), token: Array | None = None,
    inputs: Sequence[Array] = (),
) -> list[Array]:  # fmt: skip
    """What a program makes of the sums of a rows problem, and of other arrays.

    Args:
      problem: the problem.
      tile: the largest tile of a thread.
      program: it reads the sums, those of a second product if there is one, and the inputs; results are the problem's.
      operands: lhs, rhs, group sizes and first group.
      second: the rhs of a second product, or its lhs and rhs.
      biases: of the product, and of the second one.
      token: i32[rows], the row of lhs that each row is, if they are gathered.
      inputs: arrays [rows, n], which the first results take the memory of, or [rows].
    """
    lhs, rhs, sizes, first = operands
    given = [*second, *(x.astype(problem.acc) for x in biases), *(() if token is None else (token,))]
    attributes = {
        "transpose_rhs": problem.transpose_rhs,
        "bias": len(biases) > 0,
        "gather": token is not None,
        "second": np.int64(len(second)),
        "rows": np.int64(problem.rows),
        "local": np.int64(problem.local_groups),
        "tile": np.array((tile.m, tile.k, tile.n), np.int64),
    }
    results = [(problem.out_shape, problem.out)] if problem.gate is None else problem.results
    out = [jax.ShapeDtypeStruct(*each) for each in results]
    every = [lhs, rhs, flat_sizes(sizes, problem.m), first, *given, *inputs]
    matrices = [4 + len(given) + i for i, x in enumerate(inputs) if x.ndim == 2]
    aliases = {operand: result for result, operand in enumerate(matrices)}
    found: list[Array] = list(call("fused", every, out, {**attributes, **program.attributes}, aliases))
    return found
