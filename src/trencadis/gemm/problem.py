"""What a grouped GEMM asks: three dimensions, each the same for all groups or ragged, and how three tensors store them.

    out_i[m_i, n_i] = lhs_i[m_i, k_i] @ rhs_i[k_i, n_i]

A tensor has two of the dimensions. None of them ragged: a stack `[g, ., .]`. One: an array `[rows of all groups, .]`.
Both: a flat buffer, one matrix after the other. Derivatives exchange m, k and n, so that they are such GEMMs again.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from trencadis.core.dtypes import accumulator

Shape = tuple[int, ...]


class Kind(enum.Enum):
    """How many of the two dimensions of a tensor are ragged."""

    STACK = 0
    ROWS = 1
    FLAT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One dimension of all groups."""

    size: int  # of a group, or of all groups together
    ragged: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """How a tensor lies in memory."""

    shape: Shape
    dtype: np.dtype[Any]
    turned: bool = False  # its second dimension comes first

    def flip(self) -> Store:
        """The same memory, seen as the transpose."""
        return dataclasses.replace(self, turned=not self.turned)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One grouped GEMM, without its numbers."""

    groups: int
    m: Dim
    k: Dim
    n: Dim
    lhs: Store  # m by k
    rhs: Store  # k by n
    out: Store  # m by n
    precision: Any = None
    # where each group lies in lhs, in rhs and in out, and its m, k and n; () where that is traced
    known: tuple[Shape, ...] = dataclasses.field(default=(), repr=False)

    @property
    def pairs(self) -> tuple[tuple[Dim, Dim], ...]:
        """The dimensions of lhs, rhs and out."""
        return (self.m, self.k), (self.k, self.n), (self.m, self.n)

    @property
    def acc(self) -> np.dtype[Any]:
        """The dtype sums are kept in."""
        return accumulator(self.lhs.dtype, self.rhs.dtype)

    def replace(self, **changes: Any) -> Gemm:
        """The same GEMM with some fields changed."""
        return dataclasses.replace(self, **changes)

    def d_lhs(self) -> Gemm:
        """Ct [m, n] x rhs [k, n] -> [m, k]: the sum runs over n."""
        known = exchanged(D_LHS, self.known)
        return self.replace(k=self.n, n=self.k, lhs=self.out, rhs=self.rhs.flip(), out=self.lhs, known=known)

    def d_rhs(self) -> Gemm:
        """Lhs [m, k] x ct [m, n] -> [k, n]: the sum runs over m."""
        known = exchanged(D_RHS, self.known)
        return self.replace(m=self.k, k=self.m, lhs=self.lhs.flip(), rhs=self.out, out=self.rhs, known=known)


# what the places of groups in lhs, rhs and out, and their m, k and n, are in a derivative
D_LHS, D_RHS = (2, 1, 0, 3, 5, 4), (0, 2, 1, 4, 3, 5)


def exchanged(order: Shape, places: Any) -> Any:
    """Places and sizes as a derivative has them."""
    return tuple(places[i] for i in order) if places else ()


def kind(*dims: Dim) -> Kind:
    """Of a tensor with these two dimensions."""
    return Kind(sum(dim.ragged for dim in dims))


def along(store: Store, dims: tuple[Dim, Dim]) -> int:
    """The axis of memory along which groups lie."""
    return int(kind(*dims) is Kind.ROWS and not dims[store.turned].ragged)
