"""Mosaic lowers every kind of problem in a process without a GPU, and the kernel is the only large operation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from sweep import sweep

import trencadis as tr
from trencadis.backends.gpu.choose import choose
from trencadis.core.arguments import problem_of
from trencadis.core.jax_compat import abstract_device

from .ahead import H200, kernels, largest_result, lowered, structs

pytestmark = pytest.mark.core

M, K, N, G = 1024, 256, 128, 4
WIDE = 384  # columns of swap-AB tiles, the last of them narrow: many branches, which take long to lower
KINDS = {
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "f16": ("float16", "float16", "float32"),
    "f32": ("float32", "float32", "float32"),
    "mixed": ("bfloat16", "float32", "float16"),
}
# every option meets two kinds, every kind both forms
COVER = [
    ("rows", "bf16", "plain"), ("rows", "f16", "transposed"), ("rows", "f32", "transposed"), ("rows", "f16", "silu"),
    ("rows", "bf16", "bias"), ("rows", "f32", "existing_out"), ("rows", "bf16", "window"), ("rows", "mixed", "batch"),
    ("rows", "bf16", "existing_out"),
    ("contraction", "bf16", "existing_out"), ("contraction", "f16", "plain"), ("contraction", "f32", "plain"),
    ("contraction", "bf16", "transposed"), ("contraction", "mixed", "window"), ("contraction", "bf16", "batch"),
]  # fmt: skip
DEFAULT = [
    ("rows", "f16", "transposed"), ("rows", "f16", "silu"), ("rows", "f32", "existing_out"),
    ("rows", "mixed", "batch"), ("contraction", "bf16", "existing_out"), ("contraction", "mixed", "window"),
    ("contraction", "f32", "plain"),
]  # fmt: skip


def call(form, option, lhs, rhs, out, n=N):
    """A function and the shapes of its operands; existing_out is the last of them."""
    groups = 2 * G if option == "window" else G
    flip, sizes = option == "transposed", ((groups,), "int32")
    common = dict(preferred_element_type=jnp.dtype(out), backend="gpu", group_offset=1 if option == "window" else None)
    if form == "rows":
        shapes = [((M, K), lhs), ((G, n, K) if flip else (G, K, n), rhs), sizes]
        extra = [((G, n), "float32")] if option == "bias" else [((M, n), out)]
        run = functools.partial(tr.grouped_matmul, transpose_rhs=flip, **common)
    else:
        shapes = [((K, M) if flip else (M, K), lhs), ((M, n), rhs), sizes]
        extra = [((G, K, n), out)]
        run = functools.partial(tr.transposed_grouped_matmul, transpose_lhs=not flip, num_actual_groups=G, **common)
    if option == "bias":
        return lambda x, w, s, b: run(x, w, s, bias=b, activation=jax.nn.gelu), shapes + extra
    if option == "existing_out":
        return lambda x, w, s, e: run(x, w, s, existing_out=e), shapes + extra
    if option == "silu":
        return functools.partial(run, activation=jax.nn.silu), shapes
    if option == "batch":
        return jax.vmap(run), [((2, *shape), dtype) for shape, dtype in shapes]
    return run, shapes


@pytest.mark.parametrize(("form", "kind", "option"), sweep(COVER, DEFAULT))
def test_lowers_to_one_kernel(form, kind, option):
    """16-bit operands are passed to the kernel as they are: no transpose, pad, conversion, or sum over group sizes."""
    wide = option in ("plain", "bias", "existing_out") and kind == "bf16"
    fn, shapes = call(form, option, *KINDS[kind], n=WIDE if wide else N)
    text = lowered(fn, *shapes)
    assert kernels(text) == 1
    if kind in ("bf16", "f16"):
        size, operation = largest_result(text)
        assert size <= 4 * G, operation


SHAPES = {
    "mixtral": (16384, 4096, 14336, 8),
    "gpt-oss": (16384, 2880, 5760, 128),
    "decode": (512, 2048, 1536, 128),
    "many rows and groups": (2**20, 1024, 1024, 1024),
    "more than 2**31 entries": (2**20, 4096, 256, 8),
}


LAYERS = [*(("rows", name) for name in SHAPES), ("contraction", "gpt-oss"), ("contraction", "many rows and groups")]


@pytest.mark.parametrize(
    ("form", "name"), sweep(LAYERS, [("rows", "gpt-oss"), ("contraction", "many rows and groups")])
)
def test_layers_of_real_models_lower(form, name):
    m, k, n, g = SHAPES[name]
    shapes = [((m, k), "bfloat16"), ((g, k, n) if form == "rows" else (m, n), "bfloat16"), ((g,), "int32")]
    fn = tr.grouped_matmul
    if form == "contraction":
        fn = functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True)
    text = lowered(fn, *shapes)
    assert kernels(text) == 1
    assert largest_result(text)[0] <= 2 * g


def test_large_problems_are_scheduled_dynamically_and_small_ones_statically():
    dynamic = {name: choose(problem_of((m, k), (g, k, n), dtype="bfloat16"), H200).dynamic
               for name, (m, k, n, g) in SHAPES.items()}  # fmt: skip
    assert dynamic["mixtral"] and dynamic["gpt-oss"] and not dynamic["decode"]


def test_a_training_step_is_three_kernels_and_nothing_else():
    def step(x, w, s, c):
        out, back = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, s, jnp.bfloat16), x, w)
        return out, *back(c)

    shapes = [((M, K), "bfloat16"), ((G, K, WIDE), "bfloat16"), ((G,), "int32"), ((M, WIDE), "bfloat16")]
    text = lowered(step, *shapes)
    assert kernels(text) == 3
    assert largest_result(text)[0] <= 2 * G
    beside = ("transpose", "pad", "concatenate", "sort", "reduce_window", "cumsum", "convert", "while")
    assert not [operation for operation in beside if f"stablehlo.{operation}" in text]


def test_equal_products_of_a_program_are_lowered_once():
    """A model with many layers has as many kernels as one layer."""

    def layers(x, w, s):
        for weights in (w, 2 * w, 3 * w):
            x = tr.grouped_matmul(x, weights, s, jnp.bfloat16)
        return x

    args = structs(((M, K), "bfloat16"), ((G, K, K), "bfloat16"), ((G,), "int32"))
    with tr.target("h200"):
        text = jax.jit(layers).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == 1 and text.count("call @grouped_matmul") == 3


@pytest.mark.sweep
def test_a_training_step_by_default_leaves_operands_as_they_are():
    """A float32 result has a float32 cotangent, which is split into hi and lo; weights are not cast or transposed."""

    def step(x, w, s, c):
        out, back = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, s), x, w)
        return out, *back(c)

    shapes = [((M, K), "bfloat16"), ((G, K, N), "bfloat16"), ((G,), "int32"), ((M, N), "float32")]
    text = lowered(step, *shapes)
    assert kernels(text) == 3
    assert largest_result(text)[0] <= 2 * M * N
    assert "stablehlo.transpose" not in text and "stablehlo.pad" not in text
    large = [jax.ShapeDtypeStruct((64 * shape[0], *shape[1:]), dtype) for shape, dtype in shapes[:2]]
    passes = tr.why(*large, jnp.zeros((64 * G,), jnp.int32), target="h200").passes
    assert [len(each.copies) for each in passes] == [0, 1, 1]
    assert all(each.copies[0].startswith(f"hi_lo float32[65536,{N}]") for each in passes[1:])


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_64_bits(form, x64):
    """With jax_enable_x64, the kernel's own numbers still have 32 bits."""
    fn, shapes = call(form, "plain", *KINDS["bf16"])
    for sizes in ("int32", "int64"):
        assert kernels(lowered(fn, *shapes[:2], (shapes[2][0], sizes))) == 1


def test_without_a_known_kind_there_is_no_kernel():
    fn, shapes = call("rows", "plain", *KINDS["bf16"])
    anywhere = functools.partial(fn, backend=None)
    with pytest.warns(tr.PerformanceWarning, match="which GPU this is for is not known here"):
        text = jax.jit(anywhere).trace(*structs(*shapes)).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == 0
    text = lowered(anywhere, *shapes, kind="NVIDIA A100-SXM4-80GB", cores=108)
    assert kernels(text) == 0 and "triton_kernel_call" in text
    with pytest.raises(ValueError, match="which GPU this is for is not known here"):
        jax.jit(fn).trace(*structs(*shapes)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_export_for_a_gpu_from_a_process_without_one(form):
    fn, shapes = call(form, "plain", *KINDS["bf16"])
    # jax.export does not guarantee that Pallas kernels stay compatible: the caller has to accept that
    allowed = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with abstract_device(H200.kind, H200.cores, platform="cuda"):
        exported = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=allowed)(*structs(*shapes))
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",) and kernels(again.mlir_module()) == 1
    assert again.out_avals == exported.out_avals


def test_the_platform_decides_at_lowering():
    """One traced function lowers to the kernel for a GPU and to XLA operations for a CPU."""
    fn, shapes = call("rows", "plain", *KINDS["bf16"])
    with abstract_device(H200.kind, H200.cores, platform="cuda"):
        traced = jax.jit(functools.partial(fn, backend=None)).trace(*structs(*shapes))
        cuda, cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    assert kernels(cuda) == 1 and "stablehlo.while" not in cuda
    assert kernels(cpu) == 0 and "stablehlo.while" in cpu


@pytest.mark.parametrize("option", sweep(["plain", "bias", "existing_out", "window"], ["existing_out", "window"]))
def test_lowers_inside_shard_map(option):
    """Any operand of the kernel may vary over a manual mesh axis: lhs, rhs, sizes, bias, existing_out."""
    mesh = jax.sharding.AbstractMesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=_device(H200.kind, H200.cores)
    )
    fn, shapes = call("rows", option, *KINDS["bf16"])
    whole = [((2 * shape[0], *shape[1:]), dtype) for shape, dtype in shapes]
    spec = jax.sharding.PartitionSpec("x")
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(spec,) * len(whole), out_specs=spec))
        text = mapped.trace(*structs(*whole)).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == 1


def _device(kind, cores):
    with abstract_device(kind, cores, platform="cuda"):
        return jax.sharding.get_abstract_mesh().abstract_device
