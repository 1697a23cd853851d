"""The picture of a grouped GEMM: which rectangle of lhs multiplies which of rhs, and where the result goes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt

from trencadis.api.gemm import grouped_gemm
from trencadis.core import arguments
from trencadis.gemm.operand import GemmOperand, gemm_operands
from trencadis.gemm.tensor import GroupedTensor
from trencadis.viz import product_svg, product_text, terminal
from trencadis.viz.mosaic import known_first
from trencadis.viz.panel import Panel
from trencadis.viz.picture import Picture

NOTEBOOK_LIMIT = 1_000  # groups; a notebook shows the text of anything larger


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Product(Picture):
    """Two grouped tensors and their product. Prints as text, draws as SVG, and counts. Made by `show_gemm`.

    >>> x = GroupedTensor.ragged_rows(np.ones((8, 4)), [3, 0, 5])
    >>> picture = product(x, x, contracting_dims=((0,), (0,)))
    >>> picture.work, picture.empty, picture.equation(2)
    (128, (1,), 'lhs[3:8]ᵀ · rhs[3:8] = result[2]')
    """

    lhs: Panel
    rhs: Panel
    result: Panel
    groups: int  # local ones or not

    @property
    def panels(self) -> tuple[Panel, Panel, Panel]:
        """The panels of lhs, rhs and the result."""
        return self.lhs, self.rhs, self.result

    @property
    def local(self) -> range:
        """The groups that are multiplied, as a range."""
        return self.result.local

    @property
    def work(self) -> int:
        """The number of multiply-adds of all local groups."""
        return sum(map(self.work_of, self.local))

    def work_of(self, group: int) -> int:
        """The number of multiply-adds of one group: m times k times n."""
        free = (size for size, role in zip(self.rhs.shape_of(group), self.rhs.roles, strict=True) if role == "n")
        return math.prod(self.lhs.shape_of(group)) * math.prod(free)

    @property
    def empty(self) -> tuple[int, ...]:
        """The local groups that have nothing to multiply."""
        return tuple(group for group in self.local if self.work_of(group) == 0)

    def equation(self, group: int) -> str:
        """The product of one group in indexing expressions, such as lhs[0:3] · rhs[0] = result[0:3]."""
        return self._equation(*(panel.where(group) for panel in self.panels))

    def shapes(self, group: int) -> str:
        """The product of one group in shapes, such as [3, 4] · [4, 6] = [3, 6]."""
        return self._equation(*(str(list(panel.shape_of(group))) for panel in self.panels))

    def _equation(self, left: str, right: str, result: str) -> str:
        """The three parts as an equation, with a ᵀ at matrices that are transposed."""
        flips = "ᵀ" if self.lhs.roles == "km" else "", "ᵀ" if self.rhs.roles == "nk" else ""
        return f"{left}{flips[0]} · {right}{flips[1]} = {result}"

    def lines(self, width: int) -> list[terminal.Line]:
        """The lines of the text, with the colours of groups."""
        return product_text.layout(self, width)

    def svg(self) -> str:
        """The product as an SVG document: lhs, rhs and the result, each group in its colour."""
        return product_svg.draw(self)

    @property
    def huge(self) -> bool:
        """Whether there are too many groups for a notebook, which then shows the text."""
        return len(self.local) > NOTEBOOK_LIMIT


def product(
    lhs: GroupedTensor,
    rhs: GroupedTensor,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    group_offset: npt.ArrayLike | None = None,
) -> Product:
    """The picture of a product of grouped tensors; arguments as in `show_gemm`.

    >>> x, w = GroupedTensor.ragged_rows(np.ones((8, 4)), [3, 5]), GroupedTensor.stacked(np.ones((2, 4, 6)))
    >>> product(x, w, contracting_dims=((1,), (1,))).result.kind.value
    'ragged rows'
    """
    known = [_known(name, tensor) for name, tensor in (("lhs", lhs), ("rhs", rhs))]
    found = []

    def call(*data: jax.Array) -> tuple[()]:
        """Trace the library itself to get the form of the result; sizes stay known, as they are not arguments."""
        pair = [dataclasses.replace(tensor, data=x) for tensor, x in zip(known, data, strict=True)]
        window = None if group_offset is None else np.asarray(group_offset)
        out = grouped_gemm(pair[0], pair[1], contracting_dims=contracting_dims, group_offset=window)
        found.append(_drawn(*gemm_operands(pair[0], pair[1], contracting_dims), out, group_offset))
        return ()

    jax.eval_shape(call, *(jax.ShapeDtypeStruct(tensor.data.shape, tensor.dtype) for tensor in known))
    return found[0]


def _known(name: str, tensor: GroupedTensor) -> GroupedTensor:
    """The tensor with its sizes as numpy arrays, or an error."""
    if not isinstance(tensor, GroupedTensor):
        raise TypeError(f"{name}: want a GroupedTensor, such as GroupedTensor.stacked(x); got {type(tensor).__name__}")
    dims = tensor.first_dims, tensor.last_dims
    known = [arguments.concrete(sizes) if isinstance(sizes, (np.ndarray, jax.Array)) else None for sizes in dims]
    if any(sizes is not None and values is None for sizes, values in zip(dims, known, strict=True)):
        raise ValueError(f"{name}: want sizes that are known now; got traced ones")
    return dataclasses.replace(tensor, first_dims=known[0], last_dims=known[1])


def _drawn(
    a: GemmOperand, b: GemmOperand, out: GroupedTensor | jax.Array, group_offset: npt.ArrayLike | None
) -> Product:
    """The picture of two operands and their result."""
    groups = max(a.tensor.num_groups, b.tensor.num_groups)
    first = known_first(group_offset, groups)
    result = out if isinstance(out, GroupedTensor) else GroupedTensor(out, None, None, out.shape)
    stacks = [t.num_groups for t in (a.tensor, b.tensor, result) if t.is_stacked]
    local = range(first, min(first + min(stacks, default=groups), groups))
    roles = "".join("m" for _ in a.free) + "".join("n" for _ in b.free)
    return Product(
        lhs=_operand(a, "m", local), rhs=_operand(b, "n", local),
        result=_panel("result", result, roles, len(a.free), local), groups=groups,
    )  # fmt: skip


def _operand(side: GemmOperand, free: str, local: range) -> Panel:
    """The panel of an operand, split where its summed axes meet its free axes, if they do so in one place."""
    axes = range(int(side.stacked), 2 if side.flat else side.tensor.ndim)
    roles = "".join("k" if axis in side.contracted else free for axis in axes)
    changes = [i for i in range(1, len(roles)) if roles[i] != roles[i - 1]]
    return _panel(side.name, side.tensor, roles, changes[0] if len(changes) == 1 else 1, local)


def _panel(name: str, tensor: GroupedTensor, roles: str, split: int, local: range) -> Panel:
    first, last = (None if x is None else tuple(map(int, x)) for x in (tensor.first_dims, tensor.last_dims))
    if first is not None or last is not None:  # bands lie along the first axis, or along the last
        split = 1 if first is not None else len(roles) - 1
    return Panel(name=name, shape=tensor.shape, first_dims=first, last_dims=last, roles=roles, split=split, local=local)
