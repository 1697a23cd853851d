"""The problems that every command measures: expert layers of known models, and small ones for a CPU.

A problem has m rows in g groups, `[m, k] x [g, k, n]`. Its group sizes follow from its fields alone, so that a name
means the same numbers on every machine. numpy is imported late: pinning to a core must come before it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

PASSES = ("forward", "d_lhs", "d_rhs")
STEP = "step"  # all three in one call, by autodiff
KINDS = ("balanced", "random", "zipf", "zipf-empties", "multinomial")
DECODE_ROWS = 64  # a group has fewer rows than this on average in a decode problem


class UnknownName(ValueError):
    """An argument of the command line names something that does not exist."""


def known(what: str, names: Sequence[str], among: Iterable[str]) -> list[str]:
    """The names, if all of them exist; otherwise an `UnknownName` that lists what does."""
    among = list(among)
    if missing := [name for name in names if name not in among]:
        raise UnknownName(f"{what}: {', '.join(missing)} not among {', '.join(among)}")
    return list(names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchProblem:
    """The shape of a grouped matmul, and how its rows are distributed over the groups."""

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
        """The useful FLOPs of each of the three passes."""
        return 2 * self.m * self.k * self.n

    def group_sizes(self) -> np.ndarray:
        """The group sizes, int32[g]; they sum to m."""
        return group_sizes(self.sizes, self.m, self.g, self.seed)

    def shape(self) -> dict[str, int]:
        """The sizes that a file of results keeps for a reader."""
        sizes = self.group_sizes()
        busy = {"nonempty": int((sizes > 0).sum()), "largest": int(sizes.max())}
        return {"m": self.m, "k": self.k, "n": self.n, "g": self.g, **busy}

    def __str__(self) -> str:
        return f"{self.name}: m={self.m} k={self.k} n={self.n} g={self.g} {self.sizes}"


def group_sizes(kind: str, m: int, g: int, seed: int = 0) -> np.ndarray:
    """The sizes of g groups that share m rows, int32[g].

    balanced: as equal as possible. multinomial: each row chooses a group uniformly. random: the same, with popularities
    from a Dirichlet distribution. zipf: popularities 1 / rank**1.2, in random order. zipf-empties: the same over 7/8 of
    the groups; the others are empty.
    """
    import numpy as np

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
        raise ValueError(f"sizes: want one of {', '.join(KINDS)}; got {kind!r}")
    return sizes.astype(np.int32)


def drawn(count: int, seed: int = 0) -> list[BenchProblem]:
    """Problems drawn at random: sizes of all magnitudes, with at most 2**31 weights."""
    dice, found = random.Random(seed), []
    while len(found) < count:
        m, g = (round(2 ** dice.uniform(*bounds)) for bounds in ((8, 16), (2, 8)))
        unit = dice.choice([16, 64])
        k, n = (round(2 ** dice.uniform(9, 13) / unit) * unit for _ in range(2))
        kind = dice.choice(["multinomial", "zipf"])
        if g * k * n <= 2**31:
            found.append(_of("gpu-drawn", f"drawn-{len(found)}", (m, k, n, g), kind))
    return found


def _of(tag: str, name: str, shape: tuple[int, int, int, int], sizes: str) -> BenchProblem:
    m, k, n, g = shape
    return BenchProblem(name=name, m=m, k=k, n=n, g=g, sizes=sizes, tags=(tag,))


def scaled(problem: BenchProblem) -> BenchProblem:
    """A smaller version for a CPU with few cores: k and n divided by 8, m by 4 unless it is small; g stays."""
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
# further layers; the GPU cost model was fitted on some of them
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
    _of("gpu-more", "gpt-oss-decode", (512, 2880, 5760, 128), "random"),
    _of("gpu-more", "chat-256", (4096, 7168, 2048, 256), "multinomial"),
)
DRAWN = drawn(10)
TPU = (
    _of("tpu", "mixtral-tpu", (8192, 4096, 14336, 8), "multinomial"),
    _of("tpu", "dsv3-tpu", (8192, 7168, 2048, 32), "multinomial"),
    _of("tpu", "qwen3-tpu", (16384, 2048, 768, 128), "multinomial"),
)
TPU_DECODE = _of("tpu-decode", "dsv3-decode-tpu", (256, 7168, 2048, 32), "multinomial")
CPU = (
    _of("cpu", "A", (4096, 1024, 1024, 8), "balanced"),
    _of("cpu", "B", (4096, 1024, 1024, 64), "zipf-empties"),
    _of("cpu", "C", (2048, 512, 512, 128), "multinomial"),
    _of("cpu", "D", (64, 1024, 1024, 64), "multinomial"),
    _of("cpu", "E", (300, 64, 32, 3), "multinomial"),
)
DEMO = (
    _of("demo", "demo-8", (2048, 512, 512, 8), "random"),
    _of("demo", "demo-64", (2048, 512, 512, 64), "random"),
)
PROBLEMS = {p.name: p for p in (*GPU, *MORE, *DRAWN, *TPU, TPU_DECODE, *CPU, *DEMO, *map(scaled, GPU))}
TAGS = tuple(sorted({tag for p in PROBLEMS.values() for tag in p.tags}))


def useful_flops(shape: Mapping[str, int], which: str) -> int:
    """The useful FLOPs of a pass on a problem of this shape; a step has those of all three passes."""
    return 2 * shape["m"] * shape["k"] * shape["n"] * (len(PASSES) if which == STEP else 1)


def is_decode(shape: Mapping[str, int]) -> bool:
    """True for few rows per group: such a problem is bound by the bytes of its weights, and is printed in ms."""
    return shape["m"] < DECODE_ROWS * shape["g"]


# time against g at m = 4096, and against m at g = 32
SCALING_G = tuple(
    BenchProblem(name=f"g{g}", m=4096, k=256, n=256, g=g, sizes="multinomial", tags=("scaling",))
    for g in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
SCALING_M = tuple(
    BenchProblem(name=f"m{m}", m=m, k=256, n=256, g=32, sizes="multinomial", tags=("scaling",))
    for m in (1024, 2048, 4096, 8192, 16384, 32768)
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RaggedProblem:
    """Groups whose m, k and n all differ, each drawn uniformly from a range, in flat buffers."""

    name: str
    groups: int
    least: int
    most: int
    seed: int = 0

    def draw(self) -> tuple[np.random.Generator, list[np.ndarray]]:
        """The generator to draw the data from, and the sizes along m, k and n, int32[groups] each."""
        import numpy as np

        rng = np.random.default_rng(self.seed)
        return rng, [rng.integers(self.least, self.most + 1, self.groups).astype(np.int32) for _ in range(3)]


RAGGED = RaggedProblem(name="ragged-32", groups=32, least=64, most=512)
RAGGED_LARGE = RaggedProblem(name="ragged-32-large", groups=32, least=512, most=4096)  # for a GPU


def select(names: str | None, tag: str) -> list[BenchProblem]:
    """The problems named (`"A,B"`), or all that have the tag."""
    if names is None:
        known("tag", [tag], TAGS)
        return [p for p in PROBLEMS.values() if tag in p.tags]
    return [PROBLEMS[name] for name in known("problems", names.split(","), PROBLEMS)]
