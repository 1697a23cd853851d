"""The command `inspect`: what the TPU compiler makes of a grouped matmul, or of a call that a file builds."""

import dataclasses
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from trencadis.api.matmul import grouped_matmul, transposed_grouped_matmul
from trencadis.cli.options import dtype_named, integers
from trencadis.cli.sizes import random_sizes
from trencadis.core.devices import CHIPS
from trencadis.core.problem import Form
from trencadis.inspect import CompilerMissing, UnknownSchedule
from trencadis.inspect import inspect as inspect_call

Call = tuple[Callable[..., Any], tuple[Any, ...], float | None]  # function, arguments, useful operations


@dataclasses.dataclass  # rather than a function: it has more options than a function may have arguments
class Inspect:
    """Say what the TPU compiler makes of a grouped matmul, or of the call that FILE.py:builder returns.

    trencadis inspect -m 8192 -k 4096 -n 14336 -g 8 --target v6e

    trencadis inspect my_kernel.py:build --target v5e

    A builder takes no arguments and returns (fn, args) or (fn, args, {"flops": number}): the arguments are arrays or
    jax.ShapeDtypeStructs, and integer arrays count with their values. The flops are those of which a share of the peak
    is printed.
    """

    call: Annotated[str | None, typer.Argument(metavar="FILE.py:builder", show_default=False)] = None
    m: Annotated[int | None, typer.Option("-m", "--m", help="Rows of all groups; 4096 by default.")] = None
    k: Annotated[int | None, typer.Option("-k", "--k", help="Columns of lhs; 1024 by default.")] = None
    n: Annotated[int | None, typer.Option("-n", "--n", help="Columns of rhs; 1024 by default.")] = None
    groups: Annotated[int | None, typer.Option("-g", "--groups", help="Number of groups; 8 by default.")] = None
    sizes: Annotated[str | None, typer.Option(help="Group sizes: 3,0,5; by default random, uniformly.")] = None
    form: Annotated[Form | None, typer.Option(help="rows by default; contraction is a weight gradient.")] = None
    dtype: Annotated[str | None, typer.Option(help="Of lhs, rhs and result; bfloat16 by default.")] = None
    target: Annotated[str, typer.Option(metavar="NAME", help=f"Compile for {', '.join(CHIPS)}.")] = "v6e"
    xla: Annotated[
        bool | None,
        typer.Option(help="Cost XLA's operations too; by default for a grouped matmul.", show_default=False),
    ] = None
    json: Annotated[pathlib.Path | None, typer.Option(help="Write everything into this file as well.")] = None

    def __post_init__(self) -> None:
        """Run the command with these options."""
        if self.target not in CHIPS:
            raise ValueError(f"--target: want a TPU generation, one of {', '.join(CHIPS)}; got {self.target!r}")
        fn, args, flops = self._grouped_matmul() if self.call is None else self._built()
        xla = self.call is None if self.xla is None else self.xla
        try:
            found = inspect_call(fn, *args, generation=self.target, xla=xla, flops=flops)
        except (CompilerMissing, UnknownSchedule) as error:
            raise ValueError(str(error)) from error
        typer.echo(str(found))
        if self.json is not None:
            try:
                self.json.write_text(found.to_json() + "\n")
            except OSError as error:
                raise ValueError(f"--json: cannot write {self.json}: {error.strerror}") from None
        if not found.compiled:
            raise typer.Exit(1)

    def _built(self) -> Call:
        for name in ("m", "k", "n", "groups", "sizes", "form", "dtype"):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name}: is for a grouped matmul, and {self.call} builds its own call")
        return built(str(self.call))

    def _grouped_matmul(self) -> Call:
        m, k, n = 4096 if self.m is None else self.m, self.k or 1024, self.n or 1024
        for name, size in (("m", self.m), ("k", self.k), ("n", self.n)):
            if size is not None and size < 1:
                raise ValueError(f"--{name}: want a positive int; got {size}")
        if self.sizes is None:
            sizes = random_sizes(8 if self.groups is None else self.groups, m, skew="uniform")
        else:
            sizes = integers("--sizes", [self.sizes])
            if self.groups not in (None, len(sizes)):
                raise ValueError(f"--groups: want {len(sizes)}, as many as --sizes has; got {self.groups}")
            if min(sizes, default=0) < 0 or sum(sizes) > m:
                raise ValueError(f"--sizes: want sizes from 0 on that sum to at most -m, {m}; got {self.sizes}")
        dtype = dtype_named("--dtype", self.dtype or "bfloat16")
        out = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else dtype
        form = self.form or Form.ROWS
        op: Callable[..., Any] = grouped_matmul if form is Form.ROWS else transposed_grouped_matmul
        shapes: dict[Form, Any] = {
            Form.ROWS: ((m, k), (len(sizes), k, n)),
            Form.CONTRACTION: ((k, m), (m, n)),
        }
        lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[form])
        flops = 2.0 * sum(sizes) * k * n
        return lambda l, r, s: op(l, r, s, out), (lhs, rhs, np.array(sizes, np.int32)), flops


def built(place: str) -> Call:
    """The function, arguments and useful operations of the call that a builder in a file returns."""
    file, colon, name = place.rpartition(":")
    path = pathlib.Path(file)
    if not colon or path.suffix != ".py" or not name.isidentifier():
        raise ValueError(f"want FILE.py:builder; got {place!r}")
    if not path.is_file():
        raise ValueError(f"{place}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look modules up
    sys.path.insert(0, str(path.parent.absolute()))  # a file may import its neighbours, as when Python runs it
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of the user's own file: the line is what helps
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{place}: {type(error).__name__}: {error} ({line.filename}, line {line.lineno})") from error
    builder = getattr(module, name, None)
    if not callable(builder):
        raise ValueError(f"{place}: the file has no function {name}")
    match builder():
        case (fn, (list() | tuple()) as args) if callable(fn):
            return fn, tuple(args), None
        case (fn, (list() | tuple()) as args, {"flops": flops}) if callable(fn):
            return fn, tuple(args), flops
        case tuple() as parts:
            found = ", ".join(type(part).__name__ for part in parts)
            raise ValueError(f'{place}: want it to return (fn, args) or (fn, args, {{"flops": number}}); got ({found})')
        case other:
            raise ValueError(f"{place}: want it to return (fn, args); got {type(other).__name__}")
