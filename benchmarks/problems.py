"""The named problems: shapes of models people train, and the shapes our CPU work was steered by.

A problem is m rows in g groups, `[m, k] x [g, k, n]`. Its group sizes follow from its fields alone, so that a name
means the same numbers on every machine.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

PASSES = ("forward", "d_lhs", "d_rhs")
KINDS = ("balanced", "random", "zipf", "zipf-empties", "multinomial")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchProblem:
    """One shape and how its rows fall into groups."""

    name: str
    m: int
    k: int
    n: int
    g: int
    sizes: str  # one of KINDS
    seed: int = 0
    tags: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Useful FLOPs of each of the three passes."""
        return 2 * self.m * self.k * self.n

    def operand_bytes(self, itemsize: int) -> int:
        """Bytes of lhs, rhs and the result of the forward pass."""
        return itemsize * (self.m * self.k + self.g * self.k * self.n + self.m * self.n)

    def group_sizes(self) -> np.ndarray:
        """The sizes, int32[g]; they sum to m."""
        return group_sizes(self.sizes, self.m, self.g, self.seed)

    def __str__(self) -> str:
        return f"{self.name}: m={self.m} k={self.k} n={self.n} g={self.g} {self.sizes}"


def group_sizes(kind: str, m: int, g: int, seed: int = 0) -> np.ndarray:
    """How m rows fall into g groups.

    balanced: as equal as can be. multinomial: each row goes to a group at random. random: the same, with popularities
    from a Dirichlet distribution. zipf: popularities 1 / rank**1.2, in random order. zipf-empties: the same over 7/8 of
    the groups; the others get nothing.
    """
    import numpy as np  # here, so that a run can set OPENBLAS_NUM_THREADS after it has read its problems

    rng = np.random.default_rng(seed)
    if kind == "balanced":
        sizes = np.full(g, m // g)
        sizes[: m % g] += 1
    elif kind == "multinomial":
        sizes = rng.multinomial(m, np.full(g, 1 / g))
    elif kind == "random":
        sizes = rng.multinomial(m, rng.dirichlet(np.full(g, 4.0)))
    elif kind in ("zipf", "zipf-empties"):
        busy = g if kind == "zipf" else g - g // 8
        popularity = np.zeros(g)
        popularity[:busy] = 1 / np.arange(1, busy + 1) ** 1.2
        sizes = rng.multinomial(m, rng.permutation(popularity / popularity.sum()))
    else:
        raise ValueError(f"sizes: {kind!r} is none of {', '.join(KINDS)}")
    return sizes.astype(np.int32)


def _of(tag: str, name: str, shape: tuple[int, int, int, int], sizes: str) -> BenchProblem:
    m, k, n, g = shape
    return BenchProblem(name=name, m=m, k=k, n=n, g=g, sizes=sizes, tags=(tag,))


def scaled(problem: BenchProblem) -> BenchProblem:
    """A small sister for a CPU with few cores: k and n by 8, rows by 4, where there are rows to spare.

    g stays, so that there are a quarter of the rows per group.
    """
    m = problem.m if problem.m < 1024 else problem.m // 4
    return dataclasses.replace(
        problem, name=f"{problem.name}-cpu", m=m, k=problem.k // 8, n=problem.n // 8, tags=("cpu-scaled",)
    )


GPU = (
    _of("gpu", "mixtral-8x7b", (16384, 4096, 14336, 8), "random"),
    _of("gpu", "deepseek-v3-ep8", (16384, 7168, 4096, 32), "random"),
    _of("gpu", "qwen3-30b-a3b", (32768, 2048, 1536, 128), "random"),
    _of("gpu", "gpt-oss-120b", (16384, 2880, 5760, 128), "random"),
    _of("gpu", "zipf-64", (32768, 4096, 4096, 64), "zipf"),
    _of("gpu", "decode-128", (512, 2048, 1536, 128), "random"),
)
# further layers; how fast tiles of other sizes are was measured on some of them
MORE = (
    _of("gpu-more", "dbrx", (16384, 6144, 10752, 16), "random"),
    _of("gpu-more", "llama4-scout", (8192, 5120, 8192, 16), "multinomial"),
    _of("gpu-more", "deepseek-v2-lite", (24576, 2048, 1408, 64), "random"),
    _of("gpu-more", "olmoe", (65536, 2048, 1024, 64), "multinomial"),
    _of("gpu-more", "granite", (32768, 1536, 512, 40), "zipf"),
    _of("gpu-more", "granite-even", (32768, 1536, 512, 40), "balanced"),
    _of("gpu-more", "switch-base", (16384, 768, 3072, 128), "zipf-empties"),
    _of("gpu-more", "alone", (8192, 4096, 4096, 1), "balanced"),
    _of("gpu-more", "mixtral-decode", (64, 4096, 14336, 8), "multinomial"),
    _of("gpu-more", "chat-256", (4096, 7168, 2048, 256), "multinomial"),
)
TPU = (
    _of("tpu", "mixtral-tpu", (8192, 4096, 14336, 8), "multinomial"),
    _of("tpu", "dsv3-tpu", (8192, 7168, 2048, 32), "multinomial"),
    _of("tpu", "qwen3-tpu", (16384, 2048, 768, 128), "multinomial"),
)
CPU = (
    _of("cpu", "A", (4096, 1024, 1024, 8), "balanced"),
    _of("cpu", "B", (4096, 1024, 1024, 64), "zipf-empties"),
    _of("cpu", "C", (2048, 512, 512, 128), "multinomial"),
    _of("cpu", "D", (64, 1024, 1024, 64), "multinomial"),
    _of("cpu", "E", (300, 64, 32, 3), "multinomial"),
)
PROBLEMS = {p.name: p for p in (*GPU, *MORE, *TPU, *CPU, *map(scaled, GPU))}
TAGS = tuple(sorted({tag for p in PROBLEMS.values() for tag in p.tags}))

# time against g at m = 4096, and against m at g = 32
SCALING_G = tuple(
    BenchProblem(name=f"g{g}", m=4096, k=256, n=256, g=g, sizes="multinomial", tags=("scaling",))
    for g in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
SCALING_M = tuple(
    BenchProblem(name=f"m{m}", m=m, k=256, n=256, g=32, sizes="multinomial", tags=("scaling",))
    for m in (1024, 2048, 4096, 8192, 16384, 32768)
)


def select(names: str | None, tag: str) -> list[BenchProblem]:
    """The problems named (`"A,B"`), or all that carry the tag. What does not exist is an error that lists what does."""
    if names is None:
        if tag not in TAGS:
            raise ValueError(f"tag: {tag!r} is none of {', '.join(TAGS)}")
        return [p for p in PROBLEMS.values() if tag in p.tags]
    missing = [name for name in names.split(",") if name not in PROBLEMS]
    if missing:
        raise ValueError(f"problems: {', '.join(missing)} not among {', '.join(PROBLEMS)}")
    return [PROBLEMS[name] for name in names.split(",")]
