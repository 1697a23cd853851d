"""The cost model against the time of the compiler's schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import marked

import trencadis as tr
from trencadis import inspect as tpu
from trencadis.backends.tpu.choose import choose, mxu_model_for
from trencadis.backends.tpu.model import predict
from trencadis.core.arguments import problem_of
from trencadis.core.devices import CHIPS

pytestmark = [pytest.mark.core, pytest.mark.once]


@pytest.mark.parametrize(
    ("form", "chip", "dtype", "m", "g"),
    [
        ("rows", "v7x", "bfloat16", 4096, 64),  # bound by memory
        marked(("rows", "v6e", "float32", 2048, 8)),  # bound by products
        marked(("rows", "v6e", "int8", 4096, 64)),  # 8-bit operands
        marked(("contraction", "v5e", "bfloat16", 4096, 64)),
        marked(("contraction", "v6e", "float32", 2048, 8)),
    ],
)
def test_predicts_the_schedule_within_a_quarter(form, chip, dtype, m, g):
    k = n = 1024
    sizes = np.random.default_rng(0).multinomial(m, np.ones(g) / g).astype(np.int32)
    out = jnp.dtype(dtype if jnp.dtype(dtype).itemsize > 1 else "bfloat16")
    if form == "rows":
        problem, fn = problem_of((m, k), (g, k, n), dtype=dtype), tr.grouped_matmul
    else:
        problem = problem_of((k, m), (m, n), groups=g, dtype=dtype).replace(transpose_lhs=False)
        fn = lambda *xs, **options: tr.transposed_grouped_matmul(*xs, transpose_lhs=True, **options)
    problem = problem.replace(out=out)
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (problem.lhs_shape, problem.rhs_shape))
    found = tpu.inspect(lambda *xs: fn(*xs, out, backend="tpu"), lhs, rhs, sizes, generation=chip)
    (kernel,) = found.kernels
    expected = predict(problem, choose(problem, CHIPS[chip]), mxu_model_for(problem, CHIPS[chip]))
    assert 0.75 <= expected / kernel.seconds <= 1.25
    assert not kernel.warnings
