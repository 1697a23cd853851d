"""The commands, thin over `show`, `why`, `inspect` and `diagnose`. Bad input is one line on stderr and status 2."""

from __future__ import annotations

import enum
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from trencadis import why as explain
from trencadis.cli.doctor import diagnose
from trencadis.cli.inspect_command import Inspect
from trencadis.cli.show_command import Show
from trencadis.core.problem import Form


class Platform(enum.StrEnum):
    """What to plan for: a platform as JAX names it, a generation of TPU, or a GPU."""

    cpu = "cpu"
    cuda = "cuda"
    rocm = "rocm"
    tpu = "tpu"
    v5e = "v5e"
    v5p = "v5p"
    v6e = "v6e"
    v7x = "v7x"
    h100 = "h100"
    h200 = "h200"


class OneLineErrors(typer.core.TyperGroup):
    """A group of commands that reports bad input, its own or a command's, in one line."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command, and exit unless asked to return."""
        leave = options.get("standalone_mode", True)
        options["standalone_mode"] = False
        try:
            status = super().main(*args, **options)
        except typer.Abort:
            status = 130
        except (ValueError, TypeError, OverflowError) as error:
            status = _complain(str(error))
        except Exception as error:
            if not hasattr(error, "format_message"):  # how the parser's errors, of whichever click, are told from bugs
                raise
            status = _complain(error.format_message())
        if leave:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _complain(message: str) -> int:
    print(f"trencadis: {' '.join(message.split())}", file=sys.stderr)
    return 2


app = typer.Typer(
    name="trencadis",
    cls=OneLineErrors,
    help="Grouped matmul for JAX: look at schedules, at plans, and at what the TPU compiler makes of a call.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from trencadis import __version__

        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(name="show")(Show)


@app.command()
def why(
    m: Annotated[int, typer.Option(help="Rows of all groups.")] = 4096,
    k: Annotated[int, typer.Option(help="Columns of lhs.")] = 1024,
    n: Annotated[int, typer.Option(help="Columns of rhs.")] = 1024,
    groups: Annotated[int, typer.Option(help="Number of groups.")] = 8,
    dtype: Annotated[
        str, typer.Option(help="Of lhs and rhs; the result is float32, or int32 for integers.")
    ] = "bfloat16",
    form: Annotated[Form, typer.Option(help="Which axis is ragged.")] = Form.ROWS,
    transpose_rhs: Annotated[bool, typer.Option("--transpose-rhs", help="rhs is stored g x n x k.")] = False,
    platform: Annotated[Platform | None, typer.Option(help="Plan for it; by default for this machine.")] = None,
) -> None:
    """Say which backend and tile a grouped matmul gets, and why.

    trencadis why --m 4096 --k 1024 --n 1024 --groups 8 --platform tpu
    """
    for name, size in (("--m", m), ("--k", k), ("--n", n), ("--groups", groups)):
        if size < 0:
            raise ValueError(f"{name}: want a nonnegative int; got {size}")
    kind = _dtype(dtype)
    shapes = {"rows": ((m, k), (groups, n, k) if transpose_rhs else (groups, k, n)), "contraction": ((m, k), (m, n))}
    lhs, rhs = (jax.ShapeDtypeStruct(shape, kind) for shape in shapes[form.value])
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    out = jnp.int32 if jnp.issubdtype(kind, jnp.integer) else jnp.float32
    answer = explain(
        lhs, rhs, sizes, out, transpose_rhs=transpose_rhs, transpose_lhs=form is Form.CONTRACTION,
        target=None if platform is None else platform.value,
    )  # fmt: skip
    typer.echo(str(answer))


app.command(name="inspect")(Inspect)


@app.command()
def doctor() -> None:
    """Print versions and devices, what each device would use, and check a small result."""
    report = diagnose()
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"--dtype: want a dtype such as bfloat16 or float32; got {name!r}") from None
