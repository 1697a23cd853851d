"""The commands, thin over `show`, `show_gemm`, `why`, `inspect` and `diagnose`. Bad input is one line and status 2."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from trencadis.cli.doctor import diagnose
from trencadis.cli.inspect import Inspect
from trencadis.cli.show import Show, ShowGemm
from trencadis.cli.why import Why


class OneLineErrors(typer.core.TyperGroup):
    """A group of commands that reports bad input, its own or a command's, in one line on stderr."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command, and exit unless asked to return its status."""
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
    help="Grouped matmul for JAX: look at row tiles, at plans, and at what the TPU compiler makes of a call.",
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
app.command(name="show-gemm")(ShowGemm)
app.command(name="why")(Why)
app.command(name="inspect")(Inspect)


@app.command()
def doctor() -> None:
    """Print versions and devices, what each device would use, and check a small result."""
    report = diagnose()
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)
