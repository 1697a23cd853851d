"""The cases of `check`: calls, each of which is compiled once, and the values that they get."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the public API without its values, compiled once for all cases that share it."""

    form: str = "rows"  # or "contraction"
    m: int = 1000
    k: int = 256
    n: int = 192
    g: int = 8
    dtype: str = "bf16"
    out: str = "f32"
    flipped: bool = False  # rows: rhs is stored [g, n, k]; contraction: lhs is stored [m, k]
    window: int = 0  # groups that rhs or the result holds, at a traced group_offset; 0: all
    existing: str = ""  # "kept" or "donated"
    bias: bool = False
    activation: str = ""
    grad: bool = False  # of sum(out * c), with respect to both operands
    tile: tuple[int, int, int] | None = None  # the plan's own would be small for so little work

    @property
    def local(self) -> int:
        """The number of groups that rhs or the result holds."""
        return self.window or self.g

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype of each argument, in order; sizes and first are int32."""
        rows, m, k, n, g = self.form == "rows", self.m, self.k, self.n, self.local
        right = ((g, n, k) if self.flipped else (g, k, n)) if rows else (m, n)
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        found |= {"lhs": ((m, k) if rows or self.flipped else (k, m), self.dtype), "rhs": (right, self.dtype)}
        found |= {"sizes": ((self.g,), "i32")}
        found |= {"first": ((), "i32")} if self.window else {}
        found |= {"bias": ((g, n), "f32")} if self.bias else {}
        found |= {"existing": self.result()} if self.existing else {}
        return found | ({"c": self.result()} if self.grad else {})

    def result(self) -> tuple[tuple[int, ...], str]:
        """The shape and dtype of the result."""
        return ((self.m, self.n) if self.form == "rows" else (self.local, self.k, self.n)), self.out

    def depth(self, sizes: np.ndarray) -> int:
        """The number of products in the longest sum."""
        if self.form == "rows":
            return max(self.k, self.n if self.grad else 0)
        return int(sizes.max(initial=0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call with the values of its operands and sizes."""

    name: str
    call: Call
    sizes: str = "random"
    seed: int = 0
    first: int = 0  # of the window
    poison: str = ""  # where NaN and Inf are put: "unowned" rows, two "groups", weights of "empty" groups
    repeats: int = 1  # further calls that must give the same bits
    large: bool = False  # left out by --quick


def group_sizes(kind: str, m: int, g: int, seed: int) -> np.ndarray:
    """The group sizes of a case, int32[g]; they sum to at most m."""
    rng = np.random.default_rng(seed)
    sizes = np.zeros(g, np.int32)
    if kind in ("first", "middle", "last"):  # all rows
        sizes[{"first": 0, "middle": g // 2, "last": g - 1}[kind]] = m
    elif kind == "ones":  # as many groups of one row as there is room for
        sizes[: min(m, g)] = 1
    elif kind != "none":
        busy = np.ones(g) if kind != "empties" else (np.arange(g) % 3 == 1).astype(float)
        popularity = rng.dirichlet(np.full(g, 2.0)) * busy + 1e-12
        rows = m * 2 // 3 if kind == "short" else m
        sizes = np.asarray(rng.multinomial(rows, popularity / popularity.sum()), np.int32)
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# Cases


def _vary(name: str, call: Call, *kinds: str, **more: Any) -> list[Case]:
    """A case for each kind of sizes; "random3" has the seed 3."""
    split = [(kind.rstrip("0123456789"), kind) for kind in kinds]
    return [
        Case(name=f"{name}, {kind}", call=call, sizes=word, seed=int(kind[len(word) :] or 0), **more)
        for word, kind in split
    ]


def _both(form: str) -> list[Case]:
    """The cases that both forms have."""
    call = functools.partial(Call, form=form)
    tile = (64, 256, 192) if form == "contraction" else (256, 64, 192)
    plain, flipped = call(tile=tile), call(out="bf16", flipped=True, tile=tile if form == "contraction" else None)
    odd: dict[str, Any] = {"m": 1001, "k": 257, "n": 129}
    window = call(out="bf16", g=12, window=4, flipped=form == "contraction")
    wide = call(m=4096, k=64, n=128, g=1024, out="bf16", flipped=form == "contraction")
    many = call(m=2**20, k=64, n=128, g=64, out="bf16", flipped=form == "contraction")
    every = ("random", "random1", "random2", "first", "middle", "last", "empties", "none", "short", "ones")
    return [
        *_vary(f"{form} bf16 f32", plain, *every),
        *_vary(f"{form} bf16 bf16 flipped", flipped, *every),
        *_vary(f"{form} poison unowned", plain, "short", "none", "ones", poison="unowned"),
        *_vary(f"{form} poison unowned flipped", flipped, "short", "short1", poison="unowned"),
        *_vary(f"{form} poison groups", plain, "random", "empties", poison="groups"),
        *_vary(f"{form} poison groups flipped", flipped, "random", "short", poison="groups"),
        *_vary(f"{form} small tiles", call(tile=(128, 128, 128)), *every[3:], poison="unowned"),
        *_vary(f"{form} narrow tiles", call(out="bf16", tile=(256, 256, 128)), "random", "short", poison="unowned"),
        *_vary(f"{form} low tiles", call(out="bf16", tile=(128, 128, 192)), "random", "short", poison="unowned"),
        *_vary(f"{form} f16 f16", call(dtype="f16", out="f16"), "random", "short"),
        *_vary(f"{form} f32 f32", call(dtype="f32"), "random", "empties", "short"),
        *_vary(f"{form} odd", call(**odd, out="bf16"), "random", "empties", "short", poison="unowned"),
        *(
            case
            for first in (0, 5, 8)
            for case in _vary(f"{form} window at {first}", window, "random", "empties", first=first, poison="unowned")
        ),
        *_vary(f"{form} existing", call(existing="kept"), "random", "empties", "short", "none", poison="unowned"),
        *_vary(f"{form} 1024 groups", wide, "random", "ones", "last", large=True),
        *_vary(f"{form} 2**20 rows", many, "random", "middle", "short", large=True),
        *_vary(f"{form} 100 times", plain, "random4", repeats=100),
    ]


def cases() -> list[Case]:
    """All cases, with names that are unique."""
    wide: dict[str, Any] = {"m": 8192, "k": 4096, "n": 4096, "g": 160, "out": "bf16"}  # an operand of 2.7e9 elements
    summed = functools.partial(Call, form="contraction")
    return [
        *_both("rows"),
        *_both("contraction"),
        *_vary("rows poison empty", Call(), "empties", "ones", poison="empty"),
        *_vary("rows f32 f32 flipped", Call(dtype="f32", flipped=True), "random"),
        *_vary("rows odd flipped", Call(m=1001, k=257, n=129, flipped=True), "random", "short", poison="groups"),
        *_vary("rows of 360 flipped", Call(n=360, flipped=True, out="bf16"), "random", "short", poison="unowned"),
        *_vary("rows of 360", Call(n=360, out="bf16", bias=True), "random", "empties"),
        *_vary("rows 1 x 7 x 63", Call(m=1, k=7, n=63, g=3), "first", "last", "none"),
        *_vary("rows 65 x 65 x 7", Call(m=65, k=65, n=7, g=5, out="bf16"), "random", "ones"),
        *_vary("rows 63 x 1 x 65", Call(m=63, k=1, n=65, g=5, flipped=True), "random", "short"),
        *_vary("contraction 65 x 63 x 7", summed(m=65, k=63, n=7, g=5, flipped=True), "random", "ones"),
        *_vary(
            "rows existing, window, donated",
            Call(out="bf16", g=12, window=4, existing="donated"), "random", "short", first=5, poison="unowned",
        ),
        *_vary("contraction existing, donated", summed(existing="donated", flipped=True), "random", "empties"),
        *_vary("rows bias", Call(out="bf16", bias=True), "random", "empties", "short", poison="unowned"),
        *_vary("rows bias silu", Call(out="bf16", bias=True, activation="silu"), "random", "short"),
        *_vary("rows bias gelu", Call(bias=True, activation="gelu", flipped=True), "random", "short"),
        *_vary("rows bias relu", Call(m=1001, n=129, bias=True, activation="relu"), "random", "short"),
        *_vary("rows grad", Call(out="bf16", grad=True), "random", "empties", "short"),
        *_vary("rows grad, f32 result", Call(grad=True, flipped=True), "random", "short"),
        *_vary("rows grad, odd", Call(m=1001, k=257, n=129, out="bf16", grad=True), "random"),
        *_vary("contraction grad", summed(out="bf16", flipped=True, grad=True), "random", "short"),
        *_vary("rows, rhs of 2.7e9", Call(**wide), "random", "last", large=True),
        *_vary("contraction, result of 2.7e9", summed(**wide, flipped=True), "random", "first", large=True),
        *_vary("rows, result of 2.4e9", Call(m=2**20, k=64, n=2304, g=32, out="bf16"), "random", "short", large=True),
    ]  # fmt: skip
