"""What happens to a finished sum before it is stored: `existing_out + activation(sum * scales + bias)`.

An `Epilogue` is a static part of the problem. A backend that can applies it to each tile while the tile is in registers
or on-chip memory; otherwise `core.unfused` computes the same steps with XLA operations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from trencadis.core.activation import Activation, activated
from trencadis.core.dtypes import accumulator

ALONG_K = "scales change along k, and only scales that are constant along k are applied"  # a reason to refuse


class Extras(NamedTuple):
    """The array operands of an epilogue, in the order in which they are passed; None where there is none."""

    by_row: Array | None = None  # float32 [m], [m, k / block], or [g, k] in a contraction: scales of rows
    by_column: Array | None = None  # float32 [g, n], or [g, k / block, n / block] of any dtype: scales of columns
    bias: Array | None = None  # [g, n]
    existing: Array | None = None  # of the shape and dtype of the result

    @property
    def given(self) -> list[Array]:
        """The operands that are not None."""
        return [x for x in self if x is not None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The steps that follow the product, each with a static description of its operand."""

    by_row: bool = False  # scales of rows follow
    by_column: bool = False  # scales of columns follow
    row_block: int = 0  # entries of k that share a scale of a row; 0: all of them
    column_block: tuple[int, int] = (0, 1)  # entries of k and of n that share a scale of a column; 0: all of k
    column_scales: np.dtype[Any] = np.dtype(np.float32)  # the dtype of scales of columns that change along k
    bias: np.dtype[Any] | None = None  # an operand [g, n] of this dtype follows
    activation: Activation | None = None  # a function of one number
    accumulate: bool = False  # an operand of the result's shape follows; the product is added to it

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def scaled(self) -> bool:
        """Whether the product is multiplied by scales."""
        return self.by_row or self.by_column

    @property
    def along_k(self) -> bool:
        """Whether scales change along k, so that no single factor of the finished sum can apply them."""
        return bool(self.row_block or self.column_block[0])

    @property
    def blocks(self) -> int:
        """The block length of scales that are 1 x L for lhs and L x L for rhs; 0 for any other granularity."""
        return self.row_block if self.column_block == (self.row_block, self.row_block) else 0

    @property
    def part(self) -> int:
        """The longest part of k in which every scale is constant; 0 if scales do not change along k."""
        return math.gcd(self.row_block, self.column_block[0])

    @property
    def columnwise(self) -> bool:
        """Whether scales of columns change with every entry of k, and are constant in blocks of n."""
        return self.row_block == 0 and self.column_block[0] == 1 < self.column_block[1]

    @property
    def transposed(self) -> Epilogue:
        """The scales of rhs that change along k, for the product with rhs transposed: k and n change places."""
        k, n = self.column_block
        return Epilogue(by_column=True, column_block=(n, k), column_scales=self.column_scales) if k else Epilogue()

    @property
    def scaling(self) -> Epilogue:
        """An epilogue with only the scales."""
        return dataclasses.replace(self, bias=None, activation=None, accumulate=False)

    @property
    def without_activation(self) -> Epilogue:
        """The epilogue without its activation."""
        return dataclasses.replace(self, activation=None)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the steps, in the order in which they are applied."""
        scales = f"scales per {self.part} of k" if self.along_k else "scales"
        steps = [scales] * self.scaled + ["bias"] * (self.bias is not None)
        if self.activation is not None:
            steps.append(getattr(self.activation, "__name__", type(self.activation).__name__))
        return (*steps, *["existing_out"] * self.accumulate)

    def __str__(self) -> str:
        return " + ".join(self.steps)

    def split(self, extras: tuple[Any, ...]) -> Extras:
        """The operands that follow the four of every problem, by name."""
        rest = iter(extras)
        given = (self.by_row, self.by_column, self.bias is not None, self.accumulate)
        return Extras(*(next(rest) if there else None for there in given))

    def finish(self, acc: Num[Array, "rows n"], extras: Extras, out: DTypeLike) -> Num[Array, "rows n"]:
        """A tile of sums [rows, n] after scales, bias and activation; scales of rows are [rows, 1], others [1, n]."""
        for scale in (extras.by_row, extras.by_column):
            acc = acc if scale is None else acc.astype(accumulator(acc.dtype, scale.dtype)) * scale
        if extras.bias is not None:
            acc = add(acc, extras.bias)
        return acc if self.activation is None else activated(self.activation, acc, out)


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Rows of a product that are gathered from those of an operand: row i is lhs[token[i]], or rhs[token[i]].

    Two operands follow all others: `token`, i32[m], and the inverse of the permutation, i32[m], which gradients need.
    """

    tokens: int  # the rows of the operand
    rows: Callable[[Array, Array, Array], Array]  # of the operand, token and inverse: its rows, m of them
    operand: str = "lhs"  # or "rhs", in a contraction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A gated activation in the epilogue of a rows product, its pullback, or the products of their gradients.

        forward     lhs @ gate, lhs @ up -> activation of both    a second rhs follows; `keep`: both sums are results
        pullback    the product is d h                            both sums follow, and the weight of each row [m]
        sum         lhs @ gate + lhs_up @ up                      a second lhs and rhs follow; there is no activation
        weights     lhsᵀ @ rhs of each group, a contraction       `pair`: a second rhs follows, and has a second result

    The pullback gives the cotangents of both sums, of `weight * d h`; then `weight * h`, and the sum over n of d h * h.
    All but the sum may have rows that are gathered.
    """

    activation: Activation | None  # of gate and up; None: products without one
    keep: bool = False
    pullback: bool = False
    pair: bool = False
    gather: Gather | None = None

    @property
    def products(self) -> int:
        """How many products it consists of: one or two."""
        return 1 if self.pullback or (self.activation is None and not self.pair and self.gather is not None) else 2

    @property
    def elementwise(self) -> str:
        """What follows the products, in words; nothing where they are the results."""
        if self.activation is None:
            return "" if self.pair or self.gather is not None else "their sum"
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        return f"pullback of {name}" if self.pullback else f"{name} of gate and up" + ", both kept" * self.keep

    def __str__(self) -> str:
        gathered = ", rows gathered" * (self.gather is not None)
        if self.activation is None:
            return ("one product", "two products")[self.products - 1] + gathered
        return self.elementwise + gathered


def add(a: Array, b: Array) -> Array:
    """The sum of two arrays in a dtype that holds both: a float bias is not cut to the integers it is added to."""
    dtype = accumulator(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)
