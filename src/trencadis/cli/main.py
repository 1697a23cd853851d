"""The entry point of the command line: it needs nothing of the `cli` extra, so that it can say what is missing."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run `trencadis show`, `trencadis why`, `trencadis inspect` or `trencadis doctor`."""
    try:
        import rich as rich
        import typer as typer
    except ModuleNotFoundError as error:
        sys.exit(f"trencadis: the command line needs {error.name}; install it with: pip install 'trencadis[cli]'")
    if sys.argv[1:2] in (["show"], ["inspect"]):  # no need of an accelerator: do not wait for it or take its memory
        import jax

        if not os.environ.get("JAX_PLATFORMS"):
            jax.config.update("jax_platforms", "cpu")  # JAX has read its environment by now
    from trencadis.cli.commands import app

    app(prog_name="trencadis")


if __name__ == "__main__":
    main()
