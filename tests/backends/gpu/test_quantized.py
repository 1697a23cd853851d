"""Low-precision operands: values in the interpreter, and programs with no large operation beside the kernel."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import trencadis as tr
from benchmarks.quantized_cases import checks
from trencadis.backends import gpu
from trencadis.backends.gpu import block_scales
from trencadis.core.arguments import problem_of
from trencadis.core.decision import Refusal
from trencadis.core.epilogue import Epilogue
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.quant import Scaled, prepare, quantize
from trencadis.quant.formats import FORMATS

from .ahead import kernels, largest_result, lowered, structs


def refusal(problem, target):
    """The reason why the backend refuses a problem; None if it has a plan."""
    answer = gpu.plan(problem, target, Overrides())
    return answer.reason if isinstance(answer, Refusal) else None


pytestmark = pytest.mark.core

GPU = {"backend": "gpu", "interpret": True}
CASES = functools.cache(checks)
INTERPRETED = [
    "bf16 x int8, last=False, bfloat16",
    "bf16 x int4, last=True, bfloat16",
    "bf16 x float8_e5m2, last=True, float32",
    "int8 x int8",
    "float8_e4m3fn x float8_e4m3fn, blocks",
    "float8_e4m3fn, contraction",
    "float8_e4m3fn per 128 of k x float8_e4m3fn",
    "int8 per 128 of k x int8 per 128 of k",
    "float8_e4m3fn x float8_e4m3fn per 128 x 128",
    "float8_e4m3fn per 128 of k x bf16",
    "float8_e4m3fn per 64 of k x float8_e4m3fn",
    "float8_e4m3fn per 32 of k x float8_e4m3fn",
]


@pytest.mark.once
@pytest.mark.parametrize("name", sweep(INTERPRETED, [*INTERPRETED[1:5:3], INTERPRETED[7], INTERPRETED[-1]]))
def test_by_value(name):
    """Unowned rows and their scales are NaN, sizes are no multiples of anything, the first group is not held here."""
    check = CASES()[name]
    assert check.error() < check.limit


def test_interleaved_weights_by_value():
    """Where they are no register operand, as here, rows are interleaved to match; the sums are the same."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(24, 64)), jnp.bfloat16), rng.normal(size=(2, 64, 136))
    q = quantize(w, "int4", "column")
    got, want = (tr.grouped_matmul(x, w, [5, 16], jnp.bfloat16, **GPU) for w in (prepare(q, interleave=True), q))
    np.testing.assert_array_equal(got, want)


def test_integer_sums_are_added_to_fractions():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-9, 9, shape), jnp.int8) for shape in ((64, 128), (2, 128, 64)))
    half, sizes = jnp.full((64, 64), 0.5), jnp.array([30, 20])
    got, want = (tr.grouped_matmul(x, w, sizes, existing_out=half, **how) for how in (GPU, {}))
    np.testing.assert_array_equal(got, want)


def test_more_scales_along_k_than_a_copy_takes_come_in_parts():
    blocks = Epilogue(by_row=True, by_column=True, row_block=128, column_block=(128, 128))
    asked = problem_of((8, 128 * 257), (2, 128 * 257, 128), dtype="int8", out=np.dtype("float32"), epilogue=blocks)
    target = Target(platform="cuda", kind="NVIDIA H200")
    assert "at most 256" in refusal(asked, target)
    assert refusal(asked.replace(k=128 * 256), target) is None


M, K, N, G = 512, 256, 320, 4


def rows(left, right, k=K, blocks=False, last=True, n=N, length=None):
    """A product of lhs, scaled or bfloat16, with scaled weights of another dtype, and the shapes of its arguments."""
    row, column = ((1, 128), (1, 128, 128)) if blocks else ((1, length or k), (1, 1, k) if last else (1, k, 1))
    shape = (G, n, k) if last else (G, k, n)

    def scales(shape, block):
        return tuple(-(-size // length) for size, length in zip(shape, block, strict=True)), "float32"

    def call(x, down, w, across, sizes):
        x = x if left in ("bfloat16", "float16") else Scaled(x, down, left, row)
        w = Scaled(w, across, right, column)
        return tr.grouped_matmul(x, w, sizes, jnp.bfloat16, transpose_rhs=last, backend="gpu")

    return call, [((M, k), left), scales((M, k), row), (shape, right), scales(shape, column), ((G,), "int32")]


def contraction(dtype):
    def call(x, down, y, across, sizes):
        x, y = Scaled(x, down, dtype, (1, M)), Scaled(y, across, dtype, (1, M))
        return tr.transposed_grouped_matmul(x, y.mT, sizes, jnp.bfloat16, backend="gpu")

    return call, [((K, M), dtype), ((K, 1), "float32"), ((N, M), dtype), ((N, 1), "float32"), ((G,), "int32")]


def along_k(format, length, k=K, n=192, interleaved=False, m=M):
    """Weights `[g, n, k]` with a scale for each block of k, of the dtype that the format has for scales."""
    kind = FORMATS[format]

    def call(x, values, scale, sizes):
        static = format, (1, 1, length), False, interleaved
        weights = Scaled.tree_unflatten(static, (values, scale, jnp.float32(2) if kind.total else None, None))
        return tr.grouped_matmul(x, weights, sizes, jnp.bfloat16, transpose_rhs=True, backend="gpu")

    return call, [((m, k), "bfloat16"), ((G, n, k), kind.values), ((G, n, k // length), kind.scales), ((G,), "int32")]


LOWERED = {
    "e4m3, 64-byte swizzle": lambda: rows("float8_e4m3fn", "float8_e4m3fn", k=192),
    "int8, blocks": lambda: rows("int8", "int8", blocks=True),
    "int4, RS operand": lambda: rows("bfloat16", "int4"),
    "int4, upcast in shared memory": lambda: rows("bfloat16", "int4", last=False),
    "e4m3, contraction": lambda: contraction("float8_e4m3fn"),
    "mxfp4, RS operand times scales": lambda: along_k("mxfp4", 32),
    "mxfp4, RS operand times scales, rows of an odd number of scales": lambda: along_k("mxfp4", 32, k=480),
    "mxfp8, RS operand times scales": lambda: along_k("mxfp8", 32),
    "nvfp4, RS operand times scales": lambda: along_k("nvfp4", 16),
    "int4, RS operand, promoted": lambda: along_k("int4", 128),
    "int8, RS operand, promoted": lambda: along_k("int8", 64),
    "e4m3, transposed in shared memory": lambda: rows("float8_e4m3fn", "float8_e4m3fn", last=False),
    "int8, RS operand, transposed in shared memory": lambda: rows("bfloat16", "int8", last=False),
    "float16, int4, RS operand": lambda: rows("float16", "int4"),
    "int8 x int4, unpacked in shared memory": lambda: rows("int8", "int4"),
    "e4m3 x int4, blocks, unpacked in registers": lambda: rows("float8_e4m3fn", "int4", blocks=True, n=256),
    "int8 x int4, blocks, unpacked in registers": lambda: rows("int8", "int4", blocks=True, n=256),
    "float4, RS operand, promoted every 32": lambda: along_k("float4_e2m1fn", 32),
    "float4, RS operand, promoted every 32, k of 288": lambda: along_k("float4_e2m1fn", 32, k=288),
    "mxfp4, interleaved": lambda: along_k("mxfp4", 32, interleaved=True),
    "nvfp4, interleaved, steps of 192": lambda: along_k("nvfp4", 16, k=576, interleaved=True),
    "mxfp8, interleaved": lambda: along_k("mxfp8", 32, interleaved=True),
    "int8, interleaved, promoted": lambda: along_k("int8", 128, interleaved=True),
    "float4, interleaved, promoted every 32": lambda: along_k("float4_e2m1fn", 32, interleaved=True),
    "e4m3, sums of 32": lambda: rows("float8_e4m3fn", "float8_e4m3fn", k=192, length=32),
    "e5m2, sums of 64": lambda: rows("float8_e5m2", "float8_e5m2", length=64),
    "mxfp4, interleaved, steps of three parts": lambda: along_k("mxfp4", 32, k=576, interleaved=True, m=16),
}


DEFAULT = [
    "int8, blocks", "nvfp4, RS operand times scales", "int4, RS operand, promoted",
    "e4m3, transposed in shared memory", "mxfp4, interleaved, steps of three parts", "e4m3, sums of 32",
    "e4m3 x int4, blocks, unpacked in registers",
]  # fmt: skip


@pytest.mark.parametrize("name", sweep(LOWERED, DEFAULT))
def test_lowers_to_one_kernel(name):
    """Weights are upcast in the kernel; outside of it only scales are moved.

    And lhs, if weights are an RS operand that is not interleaved.
    """
    fn, shapes = LOWERED[name]()
    text = lowered(fn, *shapes)
    assert kernels(text) == 1
    size, operation = largest_result(text)
    scales = M * K // 32 if "sums" in name else G * max(K, N, M)
    most = M * K // 4 if "interleaved" in name else 2 * M * K if "RS" in name else scales
    assert size <= most, operation


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"out": np.dtype("float32")}, "the result is float32"),
        ({"n": 128}, "n is at most 128"),
        (
            {"rhs": np.dtype("int8"), "epilogue": Epilogue(by_column=True, column_block=(48, 1))},
            "32, 64 and multiples of 128",
        ),
        (
            {"rhs": np.dtype("int8"), "epilogue": Epilogue(by_column=True, column_block=(128, 3))},
            "3 columns share one",
        ),
    ],
)
def test_scales_along_k_that_the_kernel_does_not_apply(changes, said):
    """Then the kernel of Triton applies them."""
    scales = Epilogue(by_column=True, column_block=(32, 1), column_scales=np.dtype(jnp.float8_e8m0fnu))
    asked = problem_of((64, 256), (2, 256, 256), dtype="bfloat16").replace(
        rhs=np.dtype(jnp.float4_e2m1fn), transpose_rhs=True, epilogue=scales
    )
    target = Target(platform="cuda", kind="NVIDIA H200")
    assert refusal(asked, target) is None
    assert said in refusal(asked.replace(**changes), target)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
def test_scales_along_k_of_other_dtypes_are_float32_in_the_kernel(dtype):
    """Checkpoints of AWQ and GPTQ have float16 scales."""
    scales = Epilogue(by_column=True, column_block=(128, 1), column_scales=np.dtype(getattr(jnp, dtype)))
    asked = problem_of((64, 256), (2, 256, 256), dtype="bfloat16").replace(
        rhs=np.dtype(jnp.int4), transpose_rhs=True, epilogue=scales
    )
    plan = gpu.plan(asked, Target(platform="cuda", kind="NVIDIA H200"), Overrides())
    assert plan.layout.promoted
    given = jnp.arange(1, 2 * 2 * 256 + 1, dtype=jnp.float32).reshape(2, 2, 256).astype(dtype)
    held = block_scales.stored(plan.problem, plan.layout, given)
    assert held.dtype == jnp.float32
    np.testing.assert_array_equal(held, given.mT.astype(jnp.float32))


@pytest.mark.parametrize("rows", [4, 1024])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_8_bit_weights_as_they_lie(rows, dtype):
    """Weights `[g, k, n]` are transposed in the kernel, and nothing is moved before it."""
    asked = problem_of((8 * rows, 256), (8, 256, 256), dtype=dtype, out=np.dtype(jnp.bfloat16))
    plan = gpu.plan(asked, Target(platform="cuda", kind="NVIDIA H200"), Overrides())
    assert plan.layout.transpose_in_smem and not plan.layout.k_major and plan.problem == plan.asked == asked
    assert "the kernel transposes them in shared memory" in plan.slow
    beside = gpu.plan(asked.replace(lhs=np.dtype(jnp.bfloat16)), plan.target, Overrides())
    assert beside.layout.transpose_in_smem and beside.layout.upcast and not beside.layout.upcast_in_smem


def test_4_bit_weights_as_they_lie_are_transposed_once_for_scales_along_k():
    def call(x, values, scale, sizes):
        return tr.grouped_matmul(x, Scaled(values, scale, "mxfp4", (1, 32, 1)), sizes, jnp.bfloat16)

    args = structs(
        ((M, K), "bfloat16"), ((G, K, N), "float4_e2m1fn"), ((G, K // 32, N), "float8_e8m0fnu"), ((G,), "int32")
    )
    product = tr.why(call, *args, target="h200").passes[0]
    assert product.plan.backend == "gpu" and not product.plan.split
    assert "transposed before each product" in product.plan.slow and "prepare" in product.plan.advice


E4M3 = "float8_e4m3fn"
PAIRS = {  # lhs, rhs, and the dtype in which rows are multiplied
    "mxfp8 x mxfp8": (("mxfp8", (1, 32)), ("mxfp8", (1, 32, 1)), "bfloat16"),
    "nvfp4 x e4m3": (("nvfp4", (1, 16)), (E4M3, "column"), "bfloat16"),
    "e4m3 x nvfp4": ((E4M3, "row"), ("nvfp4", (1, 16, 1)), "bfloat16"),
    "int8 x int4 by 128": (("int8", "row"), ("int4", (1, 128, 1)), "int8"),
    "int8 x int4": (("int8", "row"), ("int4", "column"), "int8"),
    "e4m3 by 32 x e4m3": ((E4M3, (1, 32)), (E4M3, "column"), E4M3),
    "e5m2 x e4m3": (("float8_e5m2", "row"), (E4M3, "column"), "bfloat16"),
    "int8 x int8 by 128": (("int8", "row"), ("int8", (1, 128, 1)), "int8"),
    "e4m3 by 128 x e4m3": ((E4M3, (1, 128)), (E4M3, "column"), E4M3),
    "e4m3 by 64 x e4m3": ((E4M3, (1, 64)), (E4M3, "column"), E4M3),
    "e4m3 by 128 x e4m3 by 128": ((E4M3, (1, 128)), (E4M3, (1, 128, 1)), E4M3),
    "e4m3 by 128 x int4 by 128": ((E4M3, (1, 128)), ("int4", (1, 128, 1)), E4M3),
    "e4m3 by 128 x int4": ((E4M3, (1, 128)), ("int4", "column"), E4M3),
    "e4m3 by 64 x int4 by 128": ((E4M3, (1, 64)), ("int4", (1, 128, 1)), "bfloat16"),
    "e4m3 by 128 x mxfp4": ((E4M3, (1, 128)), ("mxfp4", (1, 32, 1)), "bfloat16"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_kernel_for_both_operands_quantized(name):
    """Rows are multiplied as they are, or as bfloat16, which is exact."""
    left, right, dtype = PAIRS[name]

    def call(x, w, sizes):
        return tr.grouped_matmul(tr.quant.quantize(x, *left), tr.quant.quantize(w, *right), sizes, jnp.bfloat16)

    args = structs(((M, K), "float32"), ((G, K, 192), "float32"), ((G,), "int32"))
    product = tr.why(call, *args, target="h200").passes[0]
    assert product.plan.backend == "gpu" and not product.plan.split and not product.plan.peeled
    assert product.plan.problem.lhs == jnp.dtype(dtype)


def test_why_says_that_lhs_is_permuted_along_k():
    x, sizes = structs(((M, K), "bfloat16"), ((G,), "int32"))
    values, scale = structs(((G, N, K), "int4"), ((G, N, 1), "float32"))
    weights = Scaled(values, scale, "int4", (1, 1, K))
    answer = tr.why(x, weights, sizes, preferred_element_type=jnp.bfloat16, transpose_rhs=True, target="h200")
    (copy,) = answer.passes[0].copies
    assert copy.startswith(f"permute_k bfloat16[{M},{K}]")


def test_int4_weights_beside_8_bit_rows_are_unpacked_to_8_bits_where_that_is_faster():
    """Of many rows, in order along k, and half steps of it; what is not is multiplied in bfloat16."""
    scales = Epilogue(by_row=True, by_column=True, column_block=(128, 1))
    asked = problem_of((4 * 128, 256), (4, 256, 256), dtype="int8", out=np.dtype(jnp.bfloat16)).replace(
        rhs=np.dtype(jnp.int4), transpose_rhs=True, epilogue=scales
    )
    plan = gpu.plan(asked, Target(platform="cuda", kind="NVIDIA H200"), Overrides())
    assert plan.problem == asked
    layout = plan.layout
    assert layout.upcast and layout.promoted and layout.swap_ab and not layout.rewrites and layout.block_k == 128
    assert gpu.plan(asked.replace(k=320), plan.target, Overrides()).problem.lhs == jnp.int8
    slow = gpu.plan(asked.replace(interleaved=True), plan.target, Overrides())
    assert "in order" in slow.slow and "interleave=False" in slow.advice and not plan.slow
    for other in (asked.replace(m=4 * 64), asked.replace(interleaved=True), asked.replace(k=352)):
        assert gpu.plan(other, plan.target, Overrides()).problem.lhs == jnp.bfloat16
