"""The entry point of the command line: it needs nothing of the `cli` extra, so that it can say what is missing."""

from __future__ import annotations

import os
import sys

INSTALL = "pip install 'trencadis[cli]', or in a checkout: pip install '.[cli]'"


def main() -> None:
    """Run a command: `trencadis show`, `show-gemm`, `why`, `inspect` or `doctor`."""
    try:
        import rich as rich
        import typer as typer
    except ModuleNotFoundError as error:
        sys.exit(f"trencadis: the command line needs {error.name}; install it with: {INSTALL}")
    if _needs_no_device(sys.argv[1:]) and not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")  # JAX has read its environment by now
    from trencadis.cli.commands import app

    app(prog_name="trencadis")


def _needs_no_device(arguments: list[str]) -> bool:
    """Whether a command does without an accelerator, so that it need not wait for it or take its memory.

    >>> _needs_no_device(["why", "--target", "h200"]), _needs_no_device(["why"])
    (True, False)
    """
    named = any(word.partition("=")[0] in ("--target", "--platform", "--tile") for word in arguments)
    return named or arguments[:1] in (["show-gemm"], ["inspect"])


if __name__ == "__main__":
    main()
