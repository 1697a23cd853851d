"""The static description of one grouped matmul.

A `Problem` holds no arrays. It is hashable, and it is the static argument of everything below the entry points.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Epilogue, Gate, Gather

Shape = tuple[int, ...]
FLOAT32: dict[Any, lax.Precision] = {
    "tensorfloat32": lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.DEFAULT: lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.TF32_TF32_F32: lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3: lax.Precision.HIGH,
    lax.DotAlgorithmPreset.F32_F32_F32: lax.Precision.HIGHEST,
}


class Form(enum.Enum):
    """The axis along which groups differ: rows of the result, or the summed rows."""

    ROWS = "rows"  # out[r, :] = lhs[r, :] @ rhs[group of r]
    CONTRACTION = "contraction"  # out[i] = sum over the rows r of group i of lhs[r, :, None] * rhs[r, None, :]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Problem:
    """One grouped matmul without its arrays: form, sizes, dtypes, storage order, epilogue and precision.

    Rows reads lhs `[m, k]` and rhs `[g, k, n]` and gives `[m, n]`; contraction reads lhs `[m, k]` and rhs `[m, n]`
    and gives `[g, k, n]`. With `batch = b` there are b independent problems of this shape, one after the other: lhs has
    b * m rows, group sizes are `[b, groups]`, and group i of entry e meets the weights
    `(e * local_groups + i) mod (rhs_batch * local_groups)`, so that entries may share them. A contraction gives b times
    `[g, k, n]`, or with `summed` their sum, the gradient of matrices that entries share.
    """

    form: Form
    m: int
    k: int
    n: int
    groups: int  # length of group_sizes
    local_groups: int  # groups whose weights or results are held here: the window
    lhs: np.dtype
    rhs: np.dtype
    out: np.dtype
    transpose_lhs: bool = False  # contraction: lhs is stored [k, m]
    transpose_rhs: bool = False  # rows: rhs is stored [g, n, k]
    interleaved: bool = False  # rows: the last axis of rhs, as it is stored, is interleaved (core/interleave.py)
    batch: int = 1
    rhs_batch: int = 1
    summed: bool = False  # contraction: the results of batch entries are added up
    epilogue: Epilogue = Epilogue()
    gate: Gate | None = None  # a product of a gated layer, with operands and results of its own
    precision: PrecisionLike = None

    def __post_init__(self) -> None:
        if self.rows >= 2**31:
            raise ValueError(f"lhs: row positions are int32; got {self.rows} rows in all")

    @property
    def acc(self) -> np.dtype:
        """The dtype sums are kept in: float32 unless the operands are wider, int32 for narrow integers."""
        return accumulator(self.lhs, self.rhs)

    @property
    def sum(self) -> np.dtype:
        """The dtype of product, scales and bias, which the activation sees."""
        scaled = accumulator(self.acc, np.float32) if self.epilogue.scaled else self.acc
        return scaled if self.epilogue.bias is None else accumulator(scaled, self.epilogue.bias)

    @property
    def asked(self) -> PrecisionLike:
        """The precision that the caller asked for, or else the one of jax_default_matmul_precision."""
        config: Any = jax.config
        return self.precision if self.precision is not None else config.jax_default_matmul_precision

    @property
    def precisions(self) -> set[lax.Precision]:
        """The precisions of the operands, as lax knows them; empty if an algorithm was asked for."""
        asked = self.asked if isinstance(self.asked, tuple) else (self.asked,)
        try:
            return {lax.Precision.DEFAULT if one is None else lax.Precision(one) for one in asked}
        except ValueError:
            return set()

    @property
    def float32_precision(self) -> lax.Precision | None:
        """How GPUs multiply float32: DEFAULT is tf32, HIGH and HIGHEST are more; None if it is none of these."""
        if self.asked in FLOAT32:
            return FLOAT32[self.asked]
        return max(self.precisions, key=list(lax.Precision).index, default=None)

    @property
    def rows(self) -> int:
        """Rows of all batch entries together."""
        return self.batch * self.m

    @property
    def spans(self) -> int:
        """Local groups of all batch entries together."""
        return self.batch * self.local_groups

    @property
    def empty(self) -> bool:
        """Whether there is nothing to multiply."""
        return 0 in (self.k, *self.out_shape, self.rows, self.spans, self.groups)

    @property
    def weights(self) -> int:
        """Matrices rhs holds, in the rows form."""
        return self.rhs_batch * self.local_groups

    @property
    def gather(self) -> Gather | None:
        """How rows are gathered from those of an operand; None if they are its own."""
        return None if self.gate is None else self.gate.gather

    @property
    def of_rows(self) -> Problem:
        """The same problem where both operands have all rows, if they are to be gathered here."""
        return self if self.gate is None else self.replace(gate=dataclasses.replace(self.gate, gather=None))

    @property
    def without_activation(self) -> Problem:
        """The problem of the finished sum in its own dtype, to which XLA then applies the activation."""
        return self.replace(epilogue=self.epilogue.without_activation, out=self.sum)

    @property
    def lhs_shape(self) -> Shape:
        """Shape of lhs as it is stored."""
        if self.gather is not None and self.gather.operand == "lhs":
            return (self.gather.tokens, self.k)
        return (self.k, self.rows) if self.transpose_lhs else (self.rows, self.k)

    @property
    def rhs_shape(self) -> Shape:
        """Shape of rhs as it is stored."""
        if self.form is Form.CONTRACTION:
            gather = self.gather
            return (gather.tokens if gather is not None and gather.operand == "rhs" else self.rows, self.n)
        return (self.weights, self.n, self.k) if self.transpose_rhs else (self.weights, self.k, self.n)

    @property
    def out_shape(self) -> Shape:
        """The shape of the result, all batch entries together."""
        if self.form is Form.ROWS:
            return (self.rows, self.n)
        return (self.local_groups if self.summed else self.spans, self.k, self.n)

    @property
    def operands(self) -> list[tuple[Shape, DTypeLike]]:
        """Shapes and dtypes of all operands: of every problem, and those of the epilogue."""
        steps = self.epilogue
        parts, (k, n) = cdiv(self.k, steps.row_block), steps.column_block
        rows = (self.rows,) if self.form is Form.ROWS else (self.local_groups, self.k)
        columns = (self.local_groups, cdiv(self.k, k), cdiv(self.n, n)) if k else (self.local_groups, self.n)
        found: list[tuple[Shape, DTypeLike]] = [(self.lhs_shape, self.lhs), (self.rhs_shape, self.rhs)]
        found += [((self.batch, self.groups), np.int32), ((self.batch,), np.int32)]
        found += [((self.rows, parts) if steps.row_block else rows, np.float32)] * steps.by_row
        found += [(columns, steps.column_scales)] * steps.by_column
        if steps.bias is not None:
            found.append(((self.local_groups, self.n), steps.bias))
        return found + [(self.out_shape, self.out)] * steps.accumulate

    @property
    def gate_operands(self) -> list[tuple[Shape, DTypeLike]]:
        """Shapes and dtypes of the operands of a gate, which follow all others; the last are token and inverse."""
        assert self.gate is not None
        indices: list[tuple[Shape, DTypeLike]] = [((self.rows,), np.int32)] * (0 if self.gather is None else 2)
        if self.form is Form.CONTRACTION:
            return [*[(self.rhs_shape, self.rhs)] * self.gate.pair, *indices]
        if self.gate.activation is None:
            return [(self.lhs_shape, self.lhs), (self.rhs_shape, self.rhs)]
        if self.gate.pullback:  # gate, up, weight
            return [*[(self.out_shape, self.out)] * 2, ((self.rows,), self.acc), *indices]
        bias = [] if self.epilogue.bias is None else [((self.local_groups, self.n), self.epilogue.bias)]
        return [(self.rhs_shape, self.rhs), *bias, *indices]  # up

    @property
    def results(self) -> list[tuple[Shape, DTypeLike]]:
        """Shapes and dtypes of the results of a problem with a gated activation."""
        assert self.gate is not None
        if self.gate.pullback:  # d gate, d up, weight * h, d weight
            return [(self.out_shape, self.out)] * 3 + [((self.rows,), self.acc)]
        return [(self.out_shape, self.out)] * (3 if self.gate.keep else 1 + self.gate.pair)  # h, gate, up

    def replace(self, **changes: Any) -> Problem:
        """The same problem with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        m = f"m={self.m}" if self.batch == 1 else f"m={self.batch}x{self.m}"
        groups = f"g={self.groups}" if self.rhs_batch == 1 else f"g={self.rhs_batch}x{self.groups}"
        if self.local_groups != self.groups:
            groups += f" (window of {self.local_groups})"
        lhs = f"{self.lhs.name}{'ᵀ' if self.transpose_lhs else ''}"
        rhs = f"{self.rhs.name}{'ᵀ' if self.transpose_rhs else ''}{' interleaved' if self.interleaved else ''}"
        rhs += ", summed" * self.summed
        tail = "".join(f", {step}" for step in (self.epilogue, self.gate) if step)
        return f"{self.form.value} {m} k={self.k} n={self.n} {groups}: {lhs} x {rhs} -> {self.out.name}{tail}"

    def __repr__(self) -> str:
        return f"Problem({self})"


def cdiv(size: Any, by: int) -> Any:
    """How many blocks of a length cover a size, an int or an array of ints; 0 if the length is 0."""
    return (size + (by - 1)) // by if by else 0
