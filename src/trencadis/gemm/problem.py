"""The static description of a general grouped GEMM: any of m, k and n may be ragged.

    out_i[m_i, n_i] = lhs_i[m_i, k_i] @ rhs_i[k_i, n_i]

Each of the three tensors has two of the dimensions m, k and n. If neither is ragged it is a stack `[g, ., .]`; if one
is, the matrices are concatenated along it; if both are, it is a flat buffer, one matrix after the other. The gradients
exchange m, k and n, so that they are problems of the same kind.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np

from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Epilogue

Shape = tuple[int, ...]


class Packing(enum.Enum):
    """How the matrices of all groups are packed into one array, by how many of their two dimensions are ragged."""

    STACKED = 0
    CONCATENATED = 1
    FLAT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One of the dimensions m, k and n."""

    size: int  # of each group; of all groups together if it is ragged
    ragged: bool = False

    def __str__(self) -> str:
        return "ragged" if self.ragged else str(self.size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """How one tensor is stored: its array, which of its two dimensions are ragged, and whether it is transposed."""

    shape: Shape
    dtype: np.dtype[Any]
    ragged: tuple[bool, bool]  # the first dimension, and the second
    transposed: bool = False  # the second dimension is stored before the first

    @property
    def packing(self) -> Packing:
        """How the matrices of all groups are packed into the array."""
        return Packing(sum(self.ragged))

    @property
    def group_axis(self) -> int:
        """The axis of the array along which one group follows the other."""
        return int(self.packing is Packing.CONCATENATED and not self.ragged[self.transposed])

    def flip(self) -> Buffer:
        """The same array, read as the transposes of its matrices."""
        return dataclasses.replace(self, ragged=self.ragged[::-1], transposed=not self.transposed)

    def repeated(self, times: int) -> Buffer:
        """An array that holds as many times the groups."""
        shape = list(self.shape)
        shape[self.group_axis] *= times
        return dataclasses.replace(self, shape=tuple(shape))


class Groups(NamedTuple):
    """Where each group starts in lhs, rhs and out, and its sizes m, k and n: arrays i32[g], or tuples of ints if known.

    Groups follow one another in each array, and there may be unowned entries between them. A start is the index in a
    stack, the first row or column of concatenated matrices, or the first entry in a flat buffer.
    """

    lhs: Any
    rhs: Any
    out: Any
    m: Any
    k: Any
    n: Any

    def d_lhs(self) -> Groups:
        """The groups of the product that computes the gradient of lhs."""
        return Groups(lhs=self.out, rhs=self.rhs, out=self.lhs, m=self.m, k=self.n, n=self.k)

    def d_rhs(self) -> Groups:
        """The groups of the product that computes the gradient of rhs."""
        return Groups(lhs=self.lhs, rhs=self.out, out=self.rhs, m=self.k, k=self.m, n=self.n)


class Extras(NamedTuple):
    """The arrays of the epilogue of a problem; None where there is none."""

    existing: Any = None  # like the result
    alpha: Any = None  # [g]
    bias: Any = None  # [g, n]
    beta: Any = None  # [g]

    @property
    def given(self) -> tuple[Any, ...]:
        """The arrays that there are, in the order in which the primitive takes them."""
        return tuple(x for x in self if x is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmProblem:
    """What a grouped GEMM computes, without its arrays: `alpha_i * product_i + bias_i + beta_i * out_i`; hashable.

    >>> x = Buffer(shape=(6, 4), dtype=np.dtype("float32"), ragged=(True, False))
    >>> out = Buffer(shape=(12,), dtype=np.dtype("float32"), ragged=(True, True))
    >>> m = Dim(size=6, ragged=True)
    >>> print(GemmProblem(groups=3, m=m, k=Dim(size=4), n=m, lhs=x, rhs=x.flip(), out=out))
    gemm m=ragged k=4 n=ragged g=3: float32 x float32 -> float32
    """

    groups: int
    m: Dim
    k: Dim
    n: Dim
    lhs: Buffer  # m by k
    rhs: Buffer  # k by n
    out: Buffer  # m by n
    precision: Any = None
    accumulate: bool = False  # the product is added to an array like the result, whose unowned entries stay
    alpha: bool = False  # each product is multiplied by a number, [g]
    bias: bool = False  # a row is added to those of each product, [g, n]
    beta: bool = False  # what is added to is multiplied by a number, [g]
    wide: np.dtype[Any] | None = None  # the dtype of alpha, bias and beta, in which all is added; None without them
    known: Groups | None = dataclasses.field(default=None, repr=False)  # None if sizes are traced

    def __post_init__(self) -> None:
        for name, (first, second) in zip(("lhs", "rhs", "out"), self.dims, strict=True):
            buffer: Buffer = getattr(self, name)
            if buffer.ragged != (first.ragged, second.ragged):
                raise ValueError(f"{name}: want ragged {(first.ragged, second.ragged)}, as {self} has; got {buffer}")
            rank = 3 - buffer.packing.value
            if len(buffer.shape) != rank or (rank == 3 and buffer.shape[0] != self.groups):
                raise ValueError(f"{name}: want {rank} dimensions for {self.groups} groups; got {buffer}")
        if self.known is not None and any(len(each) != self.groups for each in self.known):
            raise ValueError(f"known: want starts and sizes of {self.groups} groups; got {self.known}")

    @property
    def dims(self) -> tuple[tuple[Dim, Dim], ...]:
        """The two dimensions of lhs, of rhs and of out."""
        return (self.m, self.k), (self.k, self.n), (self.m, self.n)

    @property
    def gate(self) -> None:
        """A general product has no gated activation, which a `Plan` asks for."""

    @property
    def summed(self) -> bool:
        """Nor are its results summed over blocks of rows, which a `Plan` asks for too."""
        return False

    @property
    def epilogue(self) -> Epilogue:
        """No steps of `core`: what follows the product is `alpha`, `bias`, `beta` and `accumulate`."""
        return Epilogue()

    @property
    def scaled(self) -> bool:
        """Whether more follows the product than the addition to an array."""
        return self.alpha or self.bias or self.beta

    def extras(self, arrays: Any) -> Extras:
        """The arrays of the epilogue by name, from those that there are, in the order of `Extras`."""
        rest = iter(arrays)
        given = (self.accumulate, self.alpha, self.bias, self.beta)
        return Extras(*(next(rest) if on else None for on in given))

    def product(self) -> GemmProblem:
        """The same without what is added to the product; alpha is a factor of it."""
        wide = self.wide if self.alpha else None
        return self.replace(accumulate=False, bias=False, beta=False, wide=wide)

    @property
    def acc(self) -> np.dtype[Any]:
        """The dtype in which products are summed."""
        return accumulator(self.lhs.dtype, self.rhs.dtype)

    @property
    def sum(self) -> np.dtype[Any]:
        """The dtype in which products and existing values are scaled and added."""
        if self.wide is not None:
            return self.wide
        return accumulator(self.acc, self.out.dtype) if self.accumulate else self.acc

    @property
    def empty(self) -> bool:
        """Whether an array has no entries, so that there is nothing to compute."""
        return 0 in (self.groups, *self.lhs.shape, *self.rhs.shape, *self.out.shape)

    def replace(self, **changes: Any) -> GemmProblem:
        """The same problem with some fields changed."""
        return dataclasses.replace(self, **changes)

    def d_lhs(self) -> GemmProblem:
        """ct [m, n] x rhs [k, n] -> [m, k]: the gradient of lhs, which contracts n."""
        known = self.known and self.known.d_lhs()
        return self.product().replace(
            k=self.n, n=self.k, lhs=self.out, rhs=self.rhs.flip(), out=self.lhs, known=known
        )  # fmt: skip

    def d_rhs(self) -> GemmProblem:
        """lhs [m, k] x ct [m, n] -> [k, n]: the gradient of rhs, which contracts m."""
        known = self.known and self.known.d_rhs()
        return self.product().replace(
            m=self.k, k=self.m, lhs=self.lhs.flip(), rhs=self.out, out=self.rhs, known=known
        )  # fmt: skip

    def repeated(self, times: int) -> GemmProblem:
        """The problem of a batch: as many times the groups, in arrays that hold one entry after the other."""
        m, k, n = (dataclasses.replace(dim, size=dim.size * times) if dim.ragged else dim
                   for dim in (self.m, self.k, self.n))  # fmt: skip
        lhs, rhs, out = (buffer.repeated(times) for buffer in (self.lhs, self.rhs, self.out))
        return self.replace(groups=self.groups * times, m=m, k=k, n=n, lhs=lhs, rhs=rhs, out=out, known=None)

    def __str__(self) -> str:
        dtypes = f"{self.lhs.dtype.name} x {self.rhs.dtype.name} -> {self.out.dtype.name}"
        more = " * alpha" * self.alpha + " + bias" * self.bias + " + out" * self.accumulate + " * beta" * self.beta
        return f"gemm m={self.m} k={self.k} n={self.n} g={self.groups}: {dtypes}{more}"
