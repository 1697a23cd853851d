"""The command `why`: which backend and which tiles a grouped matmul gets, and for what reason."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import typer

from trencadis.cli.options import FormOption, Groups, K, M, N, TargetOption, TransposeRhs, dtype_named, target_named
from trencadis.core.problem import Form
from trencadis.why import why

Result = typer.Option(help="Of the result; float32 by default, or int32 for integers.")


@dataclasses.dataclass  # rather than a function: it has more options than a function may have arguments
class Why:
    """Say which backend and which tile a grouped matmul gets, and why.

    trencadis why -m 4096 -k 1024 -n 1024 -g 8 --preferred-element-type bfloat16 --target v6e
    """

    m: M = 4096
    k: K = 1024
    n: N = 1024
    groups: Groups = 8
    dtype: Annotated[str, typer.Option(help="Of lhs and rhs.")] = "bfloat16"
    preferred_element_type: Annotated[str | None, Result] = None
    form: FormOption = Form.ROWS
    transpose_rhs: TransposeRhs = False
    target: TargetOption = None

    def __post_init__(self) -> None:
        """Run the command with these options."""
        m, k, n, groups = self.m, self.k, self.n, self.groups
        for name, size in (("--m", m), ("--k", k), ("--n", n), ("--groups", groups)):
            if size < 0:
                raise ValueError(f"{name}: want a nonnegative int; got {size}")
        dtype = dtype_named("--dtype", self.dtype)
        out = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
        if self.preferred_element_type is not None:
            out = dtype_named("--preferred-element-type", self.preferred_element_type)
        rhs = (m, n) if self.form is Form.CONTRACTION else (groups, n, k) if self.transpose_rhs else (groups, k, n)
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        answer = why(
            jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct(rhs, dtype), sizes, out,
            transpose_rhs=self.transpose_rhs, transpose_lhs=self.form is Form.CONTRACTION,
            target=target_named(self.target),
        )  # fmt: skip
        typer.echo(str(answer))
