"""The layers that `moe` measures: those of known models, decode steps with quantized experts, and one for a CPU."""

from __future__ import annotations

import dataclasses

from benchmarks.problems import STEP, known

FORWARD = "forward"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """A layer: t tokens of width d, each of which goes to k of e experts with hidden width f."""

    name: str
    t: int
    k: int
    d: int
    f: int
    e: int
    dtype: str = "bf16"  # of tokens, the router, and experts that are not quantized
    weights: str = ""  # of a decode step: a key of `WEIGHTS`
    biases: bool = False
    swiglu: tuple[float | None, float, float] = (None, 1.0, 0.0)  # limit, alpha and shift of `moe.swiglu`
    seed: int = 0

    @property
    def m(self) -> int:
        """The number of rows of the grouped matmuls."""
        return self.t * self.k

    @property
    def label(self) -> str:
        """The dtype as records have it: that of the weights of a decode step."""
        return f"w-{self.weights}" if self.weights else self.dtype

    @property
    def passes(self) -> tuple[str, ...]:
        """Forward, and all gradients too where the layer is one that is trained."""
        return (FORWARD,) if self.weights else (FORWARD, STEP)

    def shape(self) -> dict[str, int]:
        """The sizes that a file of results keeps for a reader."""
        return {name: getattr(self, name) for name in ("t", "k", "d", "f", "e")}


# formats of the experts of a decode step: that of `quantize` and what shares a scale; None is bfloat16
WEIGHTS: dict[str, tuple[str, str | tuple[int, ...]] | None] = {
    "bf16": None,
    "mxfp4": ("mxfp4", (1, 32, 1)),
    "int4-128": ("int4", (1, 128, 1)),
    "e4m3": ("float8_e4m3fn", "column"),
}
GPT_OSS = MoeShape(name="gpt-oss-120b", t=4096, k=4, d=2880, f=2880, e=128)
LAYERS = (
    MoeShape(name="qwen3-30b-a3b", t=4096, k=8, d=2048, f=768, e=128),
    MoeShape(name="deepseek-ep8", t=2048, k=8, d=7168, f=2048, e=32),
    GPT_OSS,
    MoeShape(name="mixtral", t=8192, k=2, d=4096, f=14336, e=8),
    MoeShape(name="sonic", t=8192, k=2, d=2048, f=3072, e=8),
)
DECODE = tuple(dataclasses.replace(GPT_OSS, name=f"decode-{name}", t=64, weights=name) for name in WEIGHTS)
# the activation and the biases that the model has: measured where it is named
BIASED = dataclasses.replace(GPT_OSS, name="gpt-oss-120b-biases", biases=True, swiglu=(7.0, 1.702, 1.0))
CPU = MoeShape(name="moe-cpu", t=4096, k=4, d=512, f=1024, e=32, dtype="f32")
SHAPES = {shape.name: shape for shape in (*LAYERS, *DECODE, BIASED, CPU)}


def select(names: str | None, device: str) -> list[MoeShape]:
    """The layers named (`"mixtral,sonic"`), or those of a device."""
    if names is None:
        return [CPU] if device == "cpu" else [*LAYERS, *DECODE]
    return [SHAPES[name] for name in known("shapes", names.split(","), SHAPES)]
