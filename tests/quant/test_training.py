"""Training through quantized operands: gradients of the numbers, from what they were quantized to."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P
from sweep import sweep

import trencadis as tr
from trencadis.core.autodiff import grouped_p
from trencadis.quant import FORMATS, Recipe, dequantize, quantize

M, K, N, SIZES = 12, 64, 8, np.array([4, 0, 5])  # three rows are unowned
G, OWNED = len(SIZES), 9
INT8 = Recipe("int8", "int8")


@pytest.fixture
def xwy(rng):
    """Rows whose sizes differ, weights whose groups do, and a cotangent; NaN in unowned rows."""
    x = rng.normal(size=(M, K)) * np.exp(rng.normal(size=(M, 1)))
    w = rng.normal(size=(G, K, N)) * np.array([1, 100, 0.01])[:, None, None]
    y = rng.normal(size=(M, N))
    x[OWNED:], y[OWNED:] = np.nan, np.nan
    return tuple(jnp.asarray(z, jnp.float32) for z in (x, w, y))


def by_rows(x, w):
    out, start = np.zeros((M, w.shape[2])), 0
    for size, matrix in zip(SIZES, w, strict=True):
        out[start : start + size] = x[start : start + size] @ matrix
        start += size
    return out


def by_sums(x, y):
    return np.stack([x[e - s : e].T @ y[e - s : e] for s, e in zip(SIZES, np.cumsum(SIZES), strict=True)])


def stands_for(x, format, granularity):
    back = jax.jit(lambda x: dequantize(quantize(x, format, granularity)))
    return np.asarray(x if format is None else back(x), np.float64)


close = functools.partial(oracle.close, limit=2e-6)


def off(got, want):
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


@functools.partial(jax.jit, static_argnums=(0, 4))
def pulled(recipe, x, w, y, turned=False):
    """The result and the gradients in x, kernel and bias; or of a kernel of several axes, stored the other way."""
    dims = ((1, 2), (3, 4)) if turned else ((1,), (1,))
    store = lambda w: w.reshape(G, 8, 8, 2, 4).transpose(0, 3, 4, 1, 2) if turned else w
    rows = lambda z: z.reshape(M, *((8, 8) if z.shape[1] == K else (2, 4))) if turned else z

    def dense(x, w, b):
        out = tr.grouped_dense(rows(x), store(w), SIZES, contracting_dims=dims, bias=b, quantization=recipe)
        return out.reshape(M, N)

    out, pull = jax.vjp(dense, x, w, jnp.zeros((G, 2, 4) if turned else (G, N)))
    d_x, d_w, d_b = pull(y)
    return out, d_x, d_w, d_b.reshape(G, N)


# ---------------------------------------------------------------------------------------------------------------------
# Without grad


WAYS = [
    ("int8", "row", "int8", "column", False),
    ("float8_e5m2", "tensor", None, None, True),
    ("mxfp8", None, "float8_e4m3fn", (1, 16, 4), True),
]


@pytest.mark.parametrize(("left", "rows", "right", "columns", "turned"), WAYS, ids=str)
def test_gradients_are_those_of_what_the_operands_were_quantized_to(left, rows, right, columns, turned, xwy):
    """Straight through, to float32: d x meets the quantized kernel and d kernel the quantized x, whatever scales do.

    Granularities are those of [m, k] and [g, k, n], however many axes there are and however they are stored.
    """
    x, w, y = xwy
    seen = stands_for(x.at[OWNED:].set(0), left, rows), stands_for(w, right, columns)
    recipe = Recipe(left and (left, rows), right and (right, columns))
    wants = by_rows(seen[0], seen[1]), by_rows(y, seen[1].swapaxes(1, 2)), by_sums(seen[0], y)
    out, d_x, d_w, d_b = pulled(recipe, x, w, y, turned)
    for got, want in zip((out, d_x, d_w), wants, strict=True):
        close(got, want)
    assert (out[OWNED:] == 0).all() and (d_x[OWNED:] == 0).all()
    close(d_b, by_sums(np.ones((M, 1)), y)[:, 0])


def test_usual_granularities():
    x, w = jnp.ones((4, 64)), jnp.ones((2, 64, 8))
    blocks = lambda *recipe: [
        jax.eval_shape(f, z).block for r in [Recipe(*recipe)] for f, z in ((r.rows, x), (r.weights, w), (r.gradient, x))
    ]
    assert blocks("int8", "int8", "int8") == [(1, 64), (1, 64, 1), (1, 64)]
    assert blocks("mxfp8", "nvfp4", "mxfp8") == [(1, 32), (1, 16, 1), (1, 32)]
    assert blocks(("int8", [1, 8]), ("int8", "group"), ("int4", "tensor")) == [(1, 8), (1, 64, 8), (4, 64)]


def test_scales_are_reused_in_the_backward_pass(rng):
    """S4-10: column scales of rhs on d lhs's input, row scales of lhs on d rhs's; int8 within 1.5 %, of 8 bits."""
    m, k, n, sizes = 160, 256, 96, np.array([50, 0, 90, 20])
    x = jnp.asarray(rng.normal(size=(m, k)) * np.exp(0.5 * rng.normal(size=(m, 1))), jnp.float32)
    w, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, k, n), (m, n)))

    def gradients(recipe, x, w, y):
        dense = lambda x, w: tr.grouped_dense(x, w / 16, sizes, activation=jax.nn.silu, quantization=recipe)
        return jax.vjp(dense, x, w)[1](y)

    want = jax.jit(functools.partial(gradients, None))(x, w, y)
    for grad, limit in ((None, 0.0125), ("float8_e5m2", 0.06)):
        step = functools.partial(gradients, Recipe("int8", "int8", grad))
        assert max(map(off, jax.jit(step)(x, w, y), want)) < limit
        products = [
            e.invars[:2] for e in equations(jax.make_jaxpr(step)(x, w, y)) if e.primitive.name == grouped_p.name
        ]
        forward, *back = ({v.aval.dtype.name for v in pair} for pair in products)
        assert forward == {"int8"} and back == 2 * [{"int8", grad or "float32"}]  # values, and rows that took scales


def equations(jaxpr):
    """Those of a jaxpr, and of the jaxprs in them."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in equation.params.values():
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(inner)


@pytest.mark.parametrize("grad", [None, "int8"])
def test_what_is_kept_are_the_quantized_operands(grad, xwy):
    """Of bfloat16 rows, half the bytes; neither x nor a scale for each entry of the result, also across a scan."""
    x, w, _ = xwy
    x, w = x.astype(jnp.bfloat16), jnp.stack([w[..., :1] * jnp.ones(K)] * 2).astype(jnp.bfloat16)

    def deep(x, w):
        dense = lambda x, w: tr.grouped_dense(x, w, SIZES, quantization=Recipe("int8", "int8", grad))
        return jax.lax.scan(lambda x, w: (dense(x, w), None), x, w)[0]

    pull = jax.eval_shape(lambda x, w: jax.vjp(jax.jit(deep), x, w)[1], x, w)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= M * K]
    assert sorted((leaf.shape, leaf.dtype.name) for leaf in kept) == [((2, G, K, K), "int8"), ((2, M, K), "int8")]


def test_forward_mode_and_second_derivatives(xwy):
    """Tangents are those of the products; a gradient is differentiable in what it does not quantize, and says so."""
    x, w, _ = xwy
    seen = stands_for(x.at[OWNED:].set(0), "int8", "row"), stands_for(w, "int8", "column")
    dense = lambda x, w: tr.grouped_dense(x, w, SIZES, quantization=INT8)
    dot = jax.jit(lambda *a: jax.jvp(dense, a, a)[1])(x, w)
    close(dot, by_rows(x, seen[1]) + by_rows(seen[0], w))

    loss = lambda x, w: jnp.sum(jnp.sin(dense(x, w)))
    turn = lambda w: by_rows(seen[0], w)
    got = jax.jit(jax.grad(lambda w: jnp.vdot(jax.grad(loss, 1)(x, w), w)))(w)
    want = by_sums(seen[0], np.cos(turn(seen[1])) - np.sin(turn(seen[1])) * turn(np.asarray(w)))
    close(got, want, limit=1e-5)
    for step in (lambda w: jax.grad(loss)(x, w).sum(), jax.jit(lambda w: jax.grad(jax.jit(loss))(x, w).sum())):
        for differentiate in (jax.grad, jax.jacfwd):
            with pytest.raises(NotImplementedError, match="quantization: its gradients are products with quantized"):
                jax.eval_shape(differentiate(step), w)


def test_activation_and_bias_differentiate_as_before(xwy):
    """An activation may close over what is differentiated; the bias is summed in float32, over rows that are owned."""
    x, w, y = xwy
    b = jnp.asarray(np.arange(G * N).reshape(G, N) / 10, jnp.bfloat16)
    dense = lambda *a, **k: tr.grouped_dense(*a[:2], SIZES, bias=a[2], **k, quantization=INT8)[:OWNED]
    fused = lambda s, *a: jnp.vdot(y[:OWNED], dense(*a, activation=lambda z: jnp.tanh(s * z)))
    apart = lambda s, *a: jnp.vdot(y[:OWNED], jnp.tanh(s * dense(*a)))
    got, want = jax.jit(lambda *a: [jax.grad(f, range(4))(*a) for f in (fused, apart)])(jnp.float32(2), x, w, b)
    for one, two in zip(got, want, strict=True):
        close(one, np.asarray(two, np.float64), limit=1e-4)
    many = jax.jit(jax.grad(lambda b: tr.grouped_dense(
        jnp.zeros((4096, 1)), jnp.zeros((1, 1, 1)), [4000], bias=b, quantization=INT8).sum()))  # fmt: skip
    assert many(jnp.zeros((1, 1), jnp.bfloat16)).astype(float).item() == 4000  # bfloat16 would stop at 256


# ---------------------------------------------------------------------------------------------------------------------
# With grad


QUANTIZED = [
    ("int8", "int8", "int8", False),
    ("float8_e4m3fn", "float8_e4m3fn", ("float8_e5m2", (1, 4)), True),
    (("int8", (1, 32)), ("int8", (1, 32, 4)), "nvfp4", False),
]


@pytest.mark.parametrize(("left", "right", "grad", "turned"), QUANTIZED, ids=str)
def test_gradients_are_quantized_for_each_product(left, right, grad, turned, xwy):
    """After scales went to them: by rows for d x, and by columns of each group for d kernel."""
    x, w, y = xwy
    recipe = Recipe(left, right, grad)
    q, r = jax.jit(recipe.rows)(x.at[OWNED:].set(0)), jax.jit(recipe.weights)(w)
    out, d_x, d_w, d_b = pulled(recipe, x, w, y, turned)
    y = y.at[OWNED:].set(0)
    seen = [np.asarray(z.dequantize(), np.float64) for z in (q, r)]
    close(out, by_rows(*seen))
    close(d_b, by_sums(np.ones((M, 1)), y)[:, 0])

    scale = np.ones((G, 1))
    if r.scale.shape[1] == 1:
        scale = np.asarray(r.scale)[:, 0]
    scale = np.repeat(scale, [*SIZES[:-1], M - SIZES[:-1].sum()], axis=0)
    came = np.asarray(jax.jit(lambda y: dequantize(recipe.gradient(y)))(y * scale), np.float64) / scale
    close(d_x, by_rows(came, seen[1].swapaxes(1, 2)), limit=1e-5)
    assert (d_x[OWNED:] == 0).all()

    scale = np.asarray(q.scale) if q.scale.shape[1] == 1 else np.ones((M, 1))
    came, kind = np.zeros((M, N)), FORMATS[grad if isinstance(grad, str) else grad[0]]
    for e, s in zip(np.cumsum(SIZES), SIZES, strict=True):
        part = np.asarray(y * scale)[e - s : e]
        step = np.abs(part).max(axis=0, initial=0) / np.float32(kind.largest)
        came[e - s : e] = np.asarray(kind.rounded(jnp.asarray(part / step)), np.float64) * step / scale[e - s : e]
    close(d_w, by_sums(seen[0], came), limit=1e-5)


def test_a_quantized_gradient_has_one_direction_and_one_order(xwy):
    x, w, _ = xwy
    loss = lambda x, w: jnp.sum(jnp.sin(tr.grouped_dense(x, w, SIZES, quantization=Recipe("int8", "int8", "int8"))))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda *a: jax.jvp(loss, a, a)).lower(x, w)
    with pytest.raises(NotImplementedError, match="want quantization=None where second derivatives are taken"):
        jax.eval_shape(jax.grad(lambda w: jax.grad(loss, 1)(x, w).sum()), w)


# ---------------------------------------------------------------------------------------------------------------------
# Either


BOTH = pytest.mark.parametrize("recipe", [INT8, Recipe("int8", "int8", "int8")], ids=["straight", "quantized"])


@BOTH
def test_nan_stays_in_its_group(recipe, xwy):
    """In x, in the kernel, and in what comes back."""
    x, w, y = xwy
    _, d_x, d_w, _ = pulled(recipe, x, w, y)
    _, bad_x, bad_w, _ = pulled(recipe, x.at[1, 3].set(jnp.nan), w, y.at[0, 2].set(jnp.inf))
    assert np.isnan(bad_w[0, 3]).all() and not np.isfinite(bad_x[0]).any()
    assert (bad_w[1:] == d_w[1:]).all() and (bad_x[4:] == d_x[4:]).all()
    _, bad_x, bad_w, _ = pulled(recipe, x, w.at[0, 3].set(jnp.nan), y)
    assert np.isnan(bad_x[:4]).all() and (bad_x[4:] == d_x[4:]).all() and (bad_w == d_w).all()


def test_nan_reaches_results_where_operands_are_large(rng):
    """XLA's maximum of so many numbers drops NaN on CPU."""
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((256, 64), (2, 64, 256)))
    x[3, 5], w[1, 7, 2] = np.nan, np.nan
    dense = functools.partial(tr.grouped_dense, contracting_dims=((1,), (1,)), quantization=Recipe(*["int8"] * 3))
    out, pull = jax.vjp(lambda x, w: dense(x, w, [100, 156]), x, w)
    assert np.isnan(out[3]).all() and np.isnan(out[100:, 2]).all() and np.isfinite(out[100:, 3:]).all()
    d_x, d_w = pull(jnp.ones_like(out).at[200, 9].set(jnp.nan))
    assert np.isnan(d_x[200]).all() and np.isnan(d_w[1, :, 9]).all() and np.isfinite(d_w[1, :, 10:]).all()


@BOTH
def test_windows_and_shards(recipe, xwy):
    """R-03: experts over a mesh with check_vma on; results and gradients of the windows add up to those of all."""
    x, w, y = xwy
    mesh = jax.make_mesh((G,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:G])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("e")), out_specs=P())
    def sharded(x, w):
        first = jax.lax.axis_index("e")
        return jax.lax.psum(tr.grouped_dense(x, w, SIZES, group_offset=first, quantization=recipe), "e")

    def step(x, w):
        out, pull = jax.vjp(sharded, x, w)
        return out, *pull(y)

    for got, want in zip(jax.jit(step)(x, w), pulled(recipe, x, w, y)[:3], strict=True):
        close(got, np.asarray(want, np.float64))


@BOTH
def test_goes_through_vmap_remat_meshes_checks_and_export(recipe, xwy):
    x, w, y = xwy
    out, d_x, d_w, _ = pulled(recipe, x, w, y)

    @jax.checkpoint
    def step(x, w, sizes):
        out, pull = jax.vjp(lambda x, w: tr.grouped_dense(x, w, sizes, quantization=recipe), x, w)
        return out, *pull(y)

    sizes = jnp.asarray(SIZES)
    many = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))(jnp.stack([x, 2 * x]), jnp.stack([w, 4 * w]), sizes)
    for got, want, times in zip(many, (out, d_x, d_w), (8, 4, 2), strict=True):  # powers of two keep values
        close(got, np.stack([want, times * want]).astype(np.float64))
    with tr.debug_checks():
        jax.eval_shape(checkify.checkify(jax.jit(step)), x, w, sizes)
    with pytest.warns(tr.PerformanceWarning, match="which GPU this is for is not known"):
        jax.export.export(jax.jit(step), platforms=["tpu", "cuda"])(x, w, sizes)
    if recipe == INT8:
        return  # the rest is the same for both
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda z, *spec: jax.device_put(z, jax.sharding.NamedSharding(mesh, P(*spec)))
        for got, want in zip(jax.jit(step)(put(x, "d"), put(w, None, "d"), sizes), (out, d_x, d_w), strict=True):
            close(got, np.asarray(want, np.float64))


MESHES = [("row", "column"), ("tensor", "tensor"), ((1, 4), (1, 4, 4))]


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), sweep(MESHES, [MESHES[1]]))
def test_recipes_divided_along_k_and_n(axis, rows, columns):
    """Scales that span devices are those of one device, and matrices stay where they are."""
    recipe = Recipe(("int8", rows), ("int8", columns), ("int8", rows))
    mesh = jax.make_mesh(
        (2, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    rng = np.random.default_rng(0)
    x, w, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8), (2, 8, 8), (8, 8)))
    put = lambda z, *spec: jax.device_put(z, jax.sharding.NamedSharding(mesh, P(*spec)))

    @jax.jit
    def step(x, w, y):
        out, pull = jax.vjp(lambda x, w: tr.grouped_dense(x, w, jnp.array([3, 4]), quantization=recipe), x, w)
        return out, *pull(y)

    given = put(x, "d"), put(w, *(None,) * axis, "e"), put(y, "d", "e" if axis == 2 else None)
    program = step.lower(*given).compile()
    for got, want in zip(program(*given), step(x, w, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not re.search(r"\[\d+,\d+,\d+\]\S* all-gather\(", program.as_text())


def test_parts_of_operands_are_whole_blocks():
    """Scales that span a dimension are those of all its parts; of blocks, a part has several and none is cut in two."""
    assert INT8.units == dict.fromkeys("mkng", 1) == Recipe(("int8", "tensor"), ("int8", "group"), "int8").units
    assert INT8.spans("lhs", "k") and not INT8.spans("rhs", "n") and not Recipe("mxfp8").spans("lhs", "k")
    assert Recipe("mxfp8", ("int8", (2, 12, 4)), ("int8", (1, 6))).units == {"m": 1, "k": 96, "n": 12, "g": 2}


def test_nothing_to_multiply():
    for m, k in ((0, 4), (5, 0)):
        x, w = jnp.ones((m, k)), jnp.ones((2, k, 3))
        dense = lambda x, w: tr.grouped_dense(x, w, [0, 0], quantization=Recipe("int8", "int8", "int8"))
        out, pull = jax.vjp(jax.jit(dense), x, w)
        assert (out == jnp.zeros((m, 3))).all() and all((d == 0).all() for d in pull(out))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Recipe("int3"), ValueError, "lhs: format: want one of int8, .*; got 'int3'"),
        (lambda: Recipe(rhs=8), TypeError, "rhs: want None, a format, or a pair of a format and a granularity; got 8"),
        (lambda: Recipe(grad=("int8", "row", 1)), TypeError, "grad: want None, a format, or a pair"),
        (lambda: tr.grouped_dense(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), [2], quantization="int8"), TypeError,
         "quantization: want a quant.Recipe; got str"),
        (lambda: tr.grouped_dense(jnp.ones((2, 2)), jnp.ones((1, 2, 2), jnp.int8), [2], quantization=INT8), TypeError,
         "kernel: want a float dtype with quantization; got int8"),
        (lambda: tr.grouped_dense(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), [3], quantization=INT8), ValueError, "a sum"),
        (lambda: tr.grouped_dense(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), [2], quantization=Recipe(("int8", (1,)))),
         ValueError, "granularity: want 2 lengths of blocks"),
        (lambda: tr.grouped_dense(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), [2], activation=3, quantization=INT8),
         TypeError, "activation: want a function of one number"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wanted(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_layer_learns_as_well(rng):
    """Experts of two layers each learn a matrix; with 8 bits forward and back they come as far."""
    e, d, f, rows = 4, 16, 32, 256
    sizes = np.bincount(rng.integers(0, e, rows), minlength=e)
    x = jnp.asarray(rng.normal(size=(rows, d)), jnp.float32)
    shapes = {"up": (e, d, f), "down": (e, f, d)}
    start = {name: jnp.asarray(rng.normal(size=s) / s[1] ** 0.5, jnp.float32) for name, s in shapes.items()}
    target = np.einsum("md,mdc->mc", x, np.repeat(rng.normal(size=(e, d, d)) / d**0.5, sizes, axis=0))

    def layer(recipe, p):
        h = tr.grouped_dense(x, p["up"], sizes, activation=jax.nn.gelu, quantization=recipe)
        return tr.grouped_dense(h, p["down"], sizes, quantization=recipe)

    @functools.partial(jax.jit, static_argnums=0)
    def train(recipe):
        loss = lambda p: jnp.mean((layer(recipe, p) - target) ** 2)

        def step(p, _):
            value, grads = jax.value_and_grad(loss)(p)
            return jax.tree.map(lambda w, g: w - 16 * g, p, grads), value

        return jax.lax.scan(step, start, length=40)[1]

    plain, quantized = train(None), train(Recipe("int8", "int8", "int8"))
    assert plain[-1] < 0.1 * plain[0] and abs(quantized[-1] / plain[-1] - 1) < 0.05
