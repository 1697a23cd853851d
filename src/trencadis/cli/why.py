"""The command `why`: which backend and which tiles a grouped matmul gets, and for what reason."""

from typing import Annotated

import jax
import jax.numpy as jnp
import typer

from trencadis.cli.options import FormOption, Groups, K, M, N, TargetOption, TransposeRhs, dtype_named, target_named
from trencadis.core.problem import Form
from trencadis.why import why as explain

DType = typer.Option(help="Of lhs and rhs; the result is float32, or int32 for integers.")


def why(
    m: M = 4096,
    k: K = 1024,
    n: N = 1024,
    groups: Groups = 8,
    dtype: Annotated[str, DType] = "bfloat16",
    form: FormOption = Form.ROWS,
    transpose_rhs: TransposeRhs = False,
    target: TargetOption = None,
) -> None:
    """Say which backend and which tile a grouped matmul gets, and why.

    trencadis why -m 4096 -k 1024 -n 1024 -g 8 --target v6e
    """
    for name, size in (("--m", m), ("--k", k), ("--n", n), ("--groups", groups)):
        if size < 0:
            raise ValueError(f"{name}: want a nonnegative int; got {size}")
    kind = dtype_named("--dtype", dtype)
    shapes = {"rows": ((m, k), (groups, n, k) if transpose_rhs else (groups, k, n)), "contraction": ((m, k), (m, n))}
    lhs, rhs = (jax.ShapeDtypeStruct(shape, kind) for shape in shapes[form.value])
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    out = jnp.int32 if jnp.issubdtype(kind, jnp.integer) else jnp.float32
    answer = explain(
        lhs, rhs, sizes, out, transpose_rhs=transpose_rhs, transpose_lhs=form is Form.CONTRACTION,
        target=target_named(target),
    )  # fmt: skip
    typer.echo(str(answer))
