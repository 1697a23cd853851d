"""How a grouped product is divided over the axes of a mesh, and what the devices exchange.

    g over an axis   each device has the matrices of consecutive groups, and 0 in rows of others; results are added up
    k                each device has a part of every sum; the parts are added up in the accumulator's dtype
    n                each device has some columns; nothing is exchanged
    m                each device has some rows, and finds their sizes by clipping the offsets; in a contraction the
                     results are added up

Where rows and matrices are divided over the same axis, rows are gathered and the result is divided as they were: a
reduce-scatter instead of a sum. Matrices divided along k or n are gathered instead, if that moves fewer bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from trencadis.core import unfused
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import Epilogue, Extras, add
from trencadis.core.interleave import run_length
from trencadis.core.jax_compat import Value
from trencadis.core.mesh import Axes, Spec
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import offsets
from trencadis.core.split import SHORT
from trencadis.core.traced import Collective

Named: TypeAlias = dict[str, Axes]  # the mesh axes over which each dimension is divided, by its name
Multiply: TypeAlias = Callable[..., Array]  # problem, operands -> the result of a product


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The mesh axes over which m, k, n and the groups of a problem are divided, and what is gathered or scattered."""

    problem: Problem  # the whole
    devices: tuple[tuple[Hashable, int], ...]  # along each axis of the mesh
    m: Axes = ()
    k: Axes = ()
    n: Axes = ()
    g: Axes = ()
    gathered: tuple[tuple[int, int, Axes], ...] = ()  # an operand, its dimension, and axes over which it is gathered
    scattered: tuple[Axes, ...]  # for each dimension of the result, the axes of a sum over which it is divided

    def parts(self, axes: Axes) -> int:
        """The number of parts into which axes divide a dimension."""
        devices = dict(self.devices)
        return math.prod(devices[axis] for axis in axes)

    def over(self, dimension: str) -> Axes:
        """The axes over which a dimension is divided, by its name in `dimensions`."""
        if dimension == "b":
            return self.m if self.problem.batch > 1 else ()
        named: Named = {"m": self.m, "k": self.k, "n": self.n, "g": self.g, "h": ()}
        if dimension in BLOCKS:
            return () if self.cut(dimension) else named[BLOCKS[dimension]]
        return named[dimension]

    def cut(self, dimension: str) -> bool:
        """Whether devices have parts of blocks of k or n: then each has all scales along it, and takes its own."""
        entries = {"k": self.local.k, "n": self.local.n}[BLOCKS[dimension]]
        return entries % block_lengths(self.problem)[dimension] > 0

    def divided(self, names: str) -> Spec:
        """How an array with these dimensions is divided."""
        return tuple(map(self.over, names))

    @property
    def operands(self) -> list[Spec]:
        """How each operand is divided when the devices start."""
        held = {(operand, dimension): axes for operand, dimension, axes in self.gathered}
        found = [
            tuple(axes + held.get((i, dimension), ()) for dimension, axes in enumerate(self.divided(names)))
            for i, names in enumerate(dimensions(self.problem))
        ]
        return [*found[:-1], self.result] if self.problem.epilogue.accumulate else found

    @property
    def result(self) -> Spec:
        """How the result is divided."""
        names = result_dimensions(self.problem)
        return tuple(self.over(name) + extra for name, extra in zip(names, self.scattered, strict=True))

    @property
    def local(self) -> Problem:
        """The problem of one device."""
        whole, blocks = self.problem, self.problem.batch > 1
        k, n = whole.k // self.parts(self.k), whole.n // self.parts(self.n)
        row_block, (block_k, block_n) = whole.epilogue.row_block, whole.epilogue.column_block
        if self.k:  # of a block that devices have parts of, each has one as long as this
            row_block, block_k = math.gcd(row_block, k) if row_block else 0, math.gcd(block_k, k) if block_k else 0
        block_n = math.gcd(block_n, n) if self.n else block_n
        return whole.replace(
            m=whole.m if blocks else whole.m // self.parts(self.m),
            batch=whole.batch // self.parts(self.m) if blocks else 1,
            k=k,
            n=n,
            local_groups=whole.local_groups // self.parts(self.g),
            epilogue=dataclasses.replace(whole.epilogue, row_block=row_block, column_block=(block_k, block_n)),
        )

    @property
    def exchanges(self) -> list[Collective]:
        """What the devices exchange: operands that are gathered, and sums of their results."""
        local, rows = self.local, self.problem.form is Form.ROWS
        operands = (local.lhs_shape, local.lhs), (local.rhs_shape, local.rhs)
        found = [Collective("all-gather", axes, *operands[operand]) for operand, _, axes in self.gathered]
        sums = self.k + self.g if rows else self.m
        narrow = rows and not self.k and not local.epilogue.accumulate  # each row is a sum of one number and zeros
        result = local.out_shape, local.out if narrow else local.sum
        over = tuple(axis for axes in self.scattered for axis in axes)
        found += [Collective("reduce-scatter", over, *result)] if over else []
        rest = tuple(axis for axis in sums if axis not in over)
        return found + ([Collective("all-reduce", rest, *result)] if rest else [])

    def windowed(self, lhs: Value, rhs: Value, sizes: Value, first: Value, *rest: Value) -> tuple[Value, ...]:
        """Operands of one device with the sizes of its rows, the first of its groups, and its own scales."""
        local = self.local
        if self.problem.batch == 1:
            sizes = clipped(sizes, self.problem.m, self.m, local.m)
        if self.g:
            first = first + _index(self.g) * np.int32(local.local_groups)
        names = itertools.chain(dimensions(self.problem)[4:], itertools.repeat(""))  # other operands may follow
        return lhs, rhs, sizes, first, *map(self._own_scales, rest, names)

    def _own_scales(self, x: Value, names: str) -> Value:
        """The scales of this device's parts of blocks, in blocks of the length of these parts."""
        whole, mine = block_lengths(self.problem), block_lengths(self.local)
        for axis, name in enumerate(names):
            over = {"k": self.k, "n": self.n}.get(BLOCKS.get(name, ""), ())
            if over and self.cut(name):
                x = jnp.repeat(x, whole[name] // mine[name], axis=axis)
                count = {"k": self.local.k, "n": self.local.n}[BLOCKS[name]] // mine[name]
                x = lax.dynamic_slice_in_dim(x, _index(over) * np.int32(count), count, axis)
        return x


BLOCKS = {"R": "k", "K": "k", "N": "n"}  # dimensions of scales: blocks of k for rows, and of k and n for columns


def block_lengths(problem: Problem) -> dict[str, int]:
    """The length of a block along each dimension of scales; 1 where there are none."""
    steps = problem.epilogue
    return {"R": steps.row_block or 1, "K": steps.column_block[0] or 1, "N": steps.column_block[1]}


def dimensions(problem: Problem) -> tuple[str, ...]:
    """The dimensions of each operand, one letter each; R, K and N are blocks, b batch entries, h all groups."""
    steps, rows = problem.epilogue, problem.form is Form.ROWS
    lhs = "km" if problem.transpose_lhs else "mk"
    rhs = ("gnk" if problem.transpose_rhs else "gkn") if rows else "mn"
    by_row = ("mR" if steps.row_block else "m") if rows else "gk"
    by_column = "gKN" if steps.column_block[0] else "gn"
    found = [lhs, rhs, "bh", "b"] + [by_row] * steps.by_row + [by_column] * steps.by_column
    return (*found, *["gn"] * (steps.bias is not None), *[result_dimensions(problem)] * steps.accumulate)


def result_dimensions(problem: Problem) -> str:
    """The dimensions of the result, one letter each."""
    return "mn" if problem.form is Form.ROWS else "gkn"


# ---------------------------------------------------------------------------------------------------------------------
# The decision


def partition(
    problem: Problem, specs: Sequence[Spec], devices: Mapping[Hashable, int], wanted: Spec | None = None
) -> Partition:
    """How a problem is divided, from how its operands are and how the result is wanted; None: as the operands say."""
    names = dimensions(problem)
    lhs, rhs = (_named(problem, devices, names[i], specs[i]) for i in (0, 1))
    if wanted is None and problem.epilogue.accumulate:
        wanted = specs[-1]
    out = None if wanted is None else _named(problem, devices, result_dimensions(problem), wanted)
    choose = _rows if problem.form is Form.ROWS else _contraction
    over, out = choose(problem, devices, lhs, rhs, out)
    over = {name: _equal_parts(problem, devices, name, axes) for name, axes in over.items()}  # those of both operands
    divided = {axis for axes in over.values() for axis in axes}
    for name, axes in out.items():  # what no operand is divided over, both are
        new = tuple(axis for axis in axes if axis not in divided)
        over[name] = _equal_parts(problem, devices, name, over[name] + new)
        divided |= set(new)
    sums = over["g"] + over["k"] if problem.form is Form.ROWS else over["m"]
    scattered = []
    for name, axes in out.items():
        kept = _equal_parts(problem, devices, name, over[name] + tuple(axis for axis in axes if axis in sums))
        scattered.append(kept[len(over[name]) :])
    gathered = [
        (i, dimension, kept[len(over[name]) :])
        for i in (0, 1)
        for dimension, name in enumerate(names[i])
        for kept in [(lhs, rhs)[i][name]]
        if len(kept) > len(over[name])
        and kept[: len(over[name])] == over[name]
        and not any(axis in over[other] for axis in kept[len(over[name]) :] for other in names[i])
    ]
    order = tuple(devices.items())
    return Partition(problem=problem, devices=order, gathered=tuple(gathered), scattered=tuple(scattered), **over)


def _rows(
    problem: Problem, devices: Mapping[Hashable, int], lhs: Named, rhs: Named, out: Named | None
) -> tuple[Named, Named]:
    """The axes of m, k, n and g in the rows form, and those wanted of the result."""
    held = {axis: name for name in "gkn" for axis in rhs[name]}
    for axis in lhs["m"]:
        if held.get(axis) in ("k", "n") and _cheaper_to_gather_rhs(problem, devices, axis, held[axis]):
            del held[axis]
    m = tuple(axis for axis in lhs["m"] if axis not in held)
    k = tuple(axis for axis in rhs["k"] if axis in held)
    k += tuple(axis for axis in lhs["k"] if axis not in held)  # of which each device takes its part of rhs
    over = {"m": m, "k": k, "n": tuple(axis for axis in rhs["n"] if axis in held), "g": rhs["g"]}
    if out is None:
        rows = tuple(axis for axis in lhs["m"] if axis in m or held.get(axis) in ("g", "k"))
        out = {"m": rows, "n": over["n"]}
    return over, out


def _contraction(
    problem: Problem, devices: Mapping[Hashable, int], lhs: Named, rhs: Named, out: Named | None
) -> tuple[Named, Named]:
    """The axes of m, k, n and g in the contraction form, and those wanted of the result."""
    both = set(lhs["k"]) & set(rhs["n"])
    gather_n = {axis for axis in both if out is not None and axis in out["k"]}
    k = tuple(axis for axis in lhs["k"] if axis not in both - gather_n)
    n = tuple(axis for axis in rhs["n"] if axis not in gather_n)
    m = tuple(axis for axis in lhs["m"] if axis not in n)
    m += tuple(axis for axis in rhs["m"] if axis not in k and axis not in m)
    over: Named = {"m": m, "k": k, "n": n, "g": ()}
    return over, {"g": (), "k": k, "n": n} if out is None else out


def _cheaper_to_gather_rhs(problem: Problem, devices: Mapping[Hashable, int], axis: Hashable, name: str) -> bool:
    """Whether rows and matrices over one axis exchange fewer bytes if matrices are gathered instead of rows."""
    rhs = problem.weights * problem.k * problem.n * problem.rhs.itemsize
    lhs = problem.rows * problem.k * problem.lhs.itemsize
    return rhs < lhs + (problem.rows * problem.n * problem.acc.itemsize if name == "k" else 0)


def _named(problem: Problem, devices: Mapping[Hashable, int], names: str, spec: Spec) -> Named:
    """The axes of each dimension, by its name, as far as they divide it into equal parts."""
    return {name: _equal_parts(problem, devices, name, axes) for name, axes in zip(names, spec, strict=True)}


def _equal_parts(problem: Problem, devices: Mapping[Hashable, int], name: str, axes: Axes) -> Axes:
    """The first of these axes, as many as divide a dimension into equal parts that the product can be cut into."""
    if _blocked(problem, name):
        return ()
    lengths = {"m": problem.rows, "k": problem.k, "n": problem.n, "g": problem.local_groups}
    units: dict[str, int] = {}
    if problem.interleaved:  # whole runs of the last axis of rhs
        last = "k" if problem.transpose_rhs else "n"
        units[last] = run_length(problem.rhs)
    if problem.batch > 1:
        units["m"] = problem.m  # whole batch entries
    parts = list(itertools.accumulate((devices[axis] for axis in axes), operator.mul))
    fits = [
        lengths[name] % count == 0 and lengths[name] // count % units.get(name, 1) == 0
        and (name != "k" or _worth_multiplying(problem, lengths[name] // count))
        for count in parts
    ]  # fmt: skip
    return axes[: fits.index(False)] if False in fits else axes


def _worth_multiplying(problem: Problem, k: int) -> bool:
    """Whether so many entries of k consist of whole blocks of scales, or of parts of them that are not too short."""
    blocks = block_lengths(problem)
    return all(math.gcd(k, blocks[each]) in (blocks[each], k) or math.gcd(k, blocks[each]) >= SHORT for each in "RK")


def _blocked(problem: Problem, name: str) -> bool:
    """Whether a dimension is not divided, since batch entries lie one after the other along it."""
    if problem.form is Form.CONTRACTION:
        return name in "mg" and problem.batch > 1 and not problem.summed
    return name in "mg" and problem.rhs_batch > 1


# ---------------------------------------------------------------------------------------------------------------------
# One device's part


def compute(part: Partition, multiply: Multiply, *operands: Value) -> Array:
    """The part of one device, from its parts of the operands, exchanges included; axes of the mesh are manual."""
    given = list(operands)
    for operand, dimension, axes in part.gathered:
        given[operand] = lax.all_gather(given[operand], axes, axis=dimension, tiled=True)
    lhs, rhs, sizes, first, *rest = part.windowed(*given)
    call = multiply, (lhs, rhs, sizes, first), part.problem.epilogue.split(tuple(rest))
    return _rows_part(part, *call) if part.problem.form is Form.ROWS else _contraction_part(part, *call)


def _rows_part(part: Partition, multiply: Multiply, operands: tuple[Value, ...], given: Extras) -> Array:
    """Sums over k are complete before bias and activation; results are added over g after them."""
    problem, (_, _, sizes, first) = part.local, operands
    steps, scales = problem.epilogue, Extras(by_row=given.by_row, by_column=given.by_column).given
    if not (part.k or part.g):
        return multiply(problem, *operands, *given.given)
    after = Epilogue(bias=steps.bias, activation=steps.activation)
    out = problem.sum if steps.accumulate else problem.out
    if not part.k:
        fused, bias = dataclasses.replace(steps, accumulate=False), [] if given.bias is None else [given.bias]
        z = multiply(problem.replace(out=out, epilogue=fused), *operands, *scales, *bias)
        return _stored(part, _reduced(part, z, part.g, part.scattered), given)
    z = multiply(problem.replace(out=problem.sum, epilogue=steps.scaling), *operands, *scales)
    if not after:
        return _stored(part, _reduced(part, z, part.k + part.g, part.scattered), given)
    rows, columns = part.scattered
    early = tuple(axis for axis in rows if axis in part.k)
    z = _reduced(part, z, part.k, (early, ()))
    fewer = problem.replace(out=out, epilogue=after)
    if problem.batch > 1:
        fewer = fewer.replace(batch=problem.batch // part.parts(early))
        sizes, first = (_sliced(part, each, 0, early) for each in (sizes, first))
    else:
        fewer = fewer.replace(m=problem.m // part.parts(early))
        sizes = clipped(sizes, problem.m, early, fewer.m)
    bias_rows = None if given.bias is None else unfused.bias_rows(fewer, given.bias, sizes, first)
    z = unfused.finish(fewer, z, sizes, first, bias=bias_rows)
    late = tuple(axis for axis in rows if axis in part.g), tuple(axis for axis in columns if axis in part.g)
    z = _sliced(part, _reduced(part, z, part.g, late), 1, tuple(axis for axis in columns if axis in part.k))
    return _stored(part, z, given)


def _contraction_part(part: Partition, multiply: Multiply, operands: tuple[Value, ...], given: Extras) -> Array:
    """Sums over rows are added up in the dtype of sums."""
    problem = part.local
    scales = Extras(by_row=given.by_row, by_column=given.by_column).given
    if not part.m:
        return multiply(problem, *operands, *given.given)
    z = multiply(problem.replace(out=problem.sum, epilogue=problem.epilogue.scaling), *operands, *scales)
    return _stored(part, _reduced(part, z, part.m, part.scattered), given)


def _stored(part: Partition, z: Array, given: Extras) -> Array:
    """A complete result in its dtype, added to existing_out; rows that no group owns are 0 in it."""
    return cast(z if given.existing is None else add(given.existing, z), part.problem.out)


def _reduced(part: Partition, z: Array, axes: Axes, scattered: Sequence[Axes]) -> Array:
    """The sum over axes of the mesh, of which each device keeps its part along scattered dimensions."""
    for dimension, over in enumerate(scattered):
        if over:
            z = lax.psum_scatter(z, over, scatter_dimension=dimension, tiled=True)
    rest = tuple(axis for axis in axes if not any(axis in over for over in scattered))
    return lax.psum(z, rest) if rest else z


def _sliced(part: Partition, z: Value, dimension: int, axes: Axes) -> Array:
    """The device's part of a dimension."""
    if not axes:
        return jnp.asarray(z)
    length = z.shape[dimension] // part.parts(axes)
    return lax.dynamic_slice_in_dim(z, _index(axes) * np.int32(length), length, dimension)


def clipped(sizes: Value, m: int, axes: Axes, rows: int) -> Value:
    """The sizes of the groups in a device's `rows` of m: offsets, clipped to them. Groups elsewhere are empty."""
    if not axes:
        return sizes
    bounds = jnp.clip(offsets(sizes, m) - _index(axes) * np.int32(rows), 0, rows)
    return bounds[..., 1:] - bounds[..., :-1]


def _index(axes: Axes) -> Array:
    """The index of this device along axes, the last of which is the fastest."""
    return lax.axis_index(axes).astype(np.int32)
