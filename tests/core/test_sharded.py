"""Grouped products on meshes: values and gradients of one device, no gathered matrices, no exchange inside a loop."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sweep import sweep

import trencadis as tr
from trencadis.inspect.aot import ENVIRONMENT

pytestmark = pytest.mark.core

M, K, N, G = 16, 8, 16, 8
SIZES = np.array([3, 0, 5, 1, 0, 2, 3, 0])  # of 16 rows, two are unowned
KINDS = (AxisType.Explicit, AxisType.Auto)
MIXED = (KINDS, KINDS[::-1])  # of the two axes of a mesh
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"

ONE, TWO = (("e",), ((2,), (4,), (8,))), (("d", "e"), ((2, 2), (2, 4), (4, 2)))
LAYOUTS = {  # specs of lhs and rhs, and of the result
    "g": (P(), P("e"), P()),
    "k": (P(), P(None, "e"), P()),
    "n": (P(), P(None, None, "e"), P(None, "e")),
    "m": (P("e"), P(), P("e")),
    "both k": (P(None, "e"), P(None, "e"), P()),
    "m and g": (P("d"), P("e"), P("d")),
    "m and n": (P("d"), P(None, None, "e"), P("d", "e")),
    "g and k": (P(), P("d", "e"), P()),
    "m, g and g": (P(("d", "e")), P("e"), P(("d", "e"))),  # rows are gathered, and the result is scattered
}
CASES = [
    (kind, layout, shape, "plain")
    for kind in KINDS
    for layout, specs in LAYOUTS.items()
    for shape in (TWO if "d" in str(specs) else ONE)[1]
]
CASES += [
    (kind, layout, (2, 2), steps) for kind in KINDS for layout in ("g and k", "m and g") for steps in ("tanh", "add")
]
CASES += [(kind, "m, g and g", (2, 4), "add") for kind in KINDS]
CASES += [(kinds, layout, (2, 2), "tanh") for kinds in MIXED for layout in ("m and g", "m and n", "g and k")]
DEFAULT = [(kind, *case) for kind in KINDS for case in (
    ("k", (4,), "plain"), ("m, g and g", (2, 4), "add"), ("m and g", (2, 2), "tanh"),
)] + [(AxisType.Auto, "n", (8,), "plain"), (KINDS, "m and g", (2, 2), "tanh")]  # fmt: skip


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((M, K), (G, K, N), (G, N), (M, N))]


def product(steps, x, w, bias, existing, **options):
    options |= {"tanh": {"bias": bias, "activation": jnp.tanh}, "add": {"existing_out": existing}, "plain": {}}[steps]
    return tr.grouped_matmul(x, w, jnp.asarray(SIZES), **options)


def step(call):
    """A program of a value and of its gradients in all arguments."""

    def both(*args):
        return call(*args), jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), tuple(range(len(args))))(*args)

    return jax.jit(both)


def on_one_device(call, *args):
    """Values and gradients without a mesh, by the backend that compiles in the least time."""
    return step(functools.partial(call, backend="reference"))(*args)


@functools.cache
def expected(steps):
    return on_one_device(functools.partial(product, steps), *arrays())


def mesh_of(kind, shape, names=None):
    names = names or (("e",) if len(shape) == 1 else ("d", "e"))
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[: np.prod(shape)])


def put(mesh, x, spec):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), x)


def close(got, want, tolerance=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, want)


def assert_lean(text):
    """Nothing of rank 3, that is no matrices, is gathered, and no exchange is in a loop."""
    assert not re.findall(r"\w+\[\d+,\d+,\d+\]\S* all-gather\(", text)
    bodies = dict(re.findall(r"^(?:ENTRY )?(%[\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    inside = re.findall(r"(?:body|condition)=(%[\w.\-]+)", text)
    seen = set()
    while inside:
        name = inside.pop()
        if name not in seen and name in bodies:
            seen.add(name)
            inside += re.findall(r"(%[\w.\-]+)", "\n".join(re.findall(r"(?:calls|to_apply|body)=[^\n]*", bodies[name])))
            assert not re.search(rf" (?:{COLLECTIVES})\(", bodies[name])


@pytest.mark.parametrize(("kind", "layout", "shape", "steps"), sweep(CASES, DEFAULT))
def test_equals_one_device(kind, layout, shape, steps):
    lhs, rhs, out = LAYOUTS[layout]
    mesh = mesh_of(kind, shape)
    given = [put(mesh, x, spec) for x, spec in zip(arrays(), (lhs, rhs, P(), out), strict=True)]
    with jax.set_mesh(mesh) if kind in MIXED else contextlib.nullcontext():
        compiled = step(functools.partial(product, steps)).lower(*given).compile()
    value, gradients = compiled(*given)
    close((value, gradients), expected(steps))
    assert_lean(compiled.as_text())
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    assert gradients[1].sharding.is_equivalent_to(NamedSharding(mesh, rhs), 3)
    if kind == AxisType.Explicit:
        assert [jax.typeof(x).sharding.spec for x in gradients] == [jax.typeof(x).sharding.spec for x in given]


@pytest.mark.parametrize("kind", KINDS)
def test_a_contraction_sums_over_rows(kind):
    """Each device computes its groups if the result is to be sharded over them, and scatters sums over its rows."""
    x, _, _, y = arrays()
    mesh = mesh_of(kind, (2, 4))
    dims = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    call = lambda x, y, out: tr.ragged_dot_general(x, y, jnp.asarray(SIZES), dims, out_sharding=out)
    want = step(functools.partial(call, out=None))(x, y)
    given = put(mesh, x, P("d")), put(mesh, y, P("d"))
    wanted = P("e", "d") if kind == AxisType.Explicit else None
    value, gradients = step(functools.partial(call, out=wanted))(*given)
    close((value, gradients), want)
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, wanted or P()), 3)


def test_the_result_is_scattered_where_that_is_asked_for():
    x, w, *_ = arrays()
    mesh = mesh_of(AxisType.Explicit, (2, 4))
    call = lambda x, w: tr.ragged_dot(x, w, jnp.asarray(SIZES), out_sharding=P("e", "d"))
    given = put(mesh, x, P()), put(mesh, w, P("e", "d"))
    compiled = step(call).lower(*given).compile()
    value, gradients = compiled(*given)
    close((value, gradients[:2]), (expected("plain")[0], expected("plain")[1][:2]))
    assert jax.typeof(value).sharding.spec == P("e", "d") and "reduce-scatter(" in compiled.as_text()


@functools.cache
def quantized(name, granularity):
    """Rows, quantized matrices, and the product with its gradient in the rows."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((M, 128), (G, 128, 16)))
    q = tr.quant.quantize(w, name, granularity)
    value, (gradient,) = on_one_device(lambda x, **options: tr.grouped_matmul(x, q, SIZES, **options), x)
    return x, q, (value, gradient)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "granularity", "spec"), sweep(
    [(name, each, spec) for name, each in (("int8", "column"), ("mxfp8", (1, 32, 1)), ("nvfp4", (1, 16, 1)))
     for spec in (P("e"), P(None, "e"), P(None, None, "e"))] + [("int8", (1, 64, 16), P(None, None, "e"))],
    [("mxfp8", (1, 32, 1), P("e")), ("int8", (1, 64, 16), P(None, None, "e"))],
))  # fmt: skip
def test_quantized_matrices(kind, name, granularity, spec):
    """Scales that the sharding does not divide are replicated; others are divided with the values they belong to.

    In the last case devices have parts of blocks of k.
    """
    x, q, want = quantized(name, granularity)
    mesh, call = mesh_of(kind, (4,)), lambda x, q: tr.grouped_matmul(x, q, SIZES)
    both = jax.jit(lambda x, q: (call(x, q), jax.grad(lambda x: jnp.sum(jnp.sin(call(x, q))))(x)))

    def place(leaf):
        divides = [axis if size % 4 == 0 else None for axis, size in zip(spec, leaf.shape, strict=False)]
        return jax.device_put(leaf, NamedSharding(mesh, P(*divides)))

    given = put(mesh, x, P()), jax.tree.map(place, q)
    compiled = both.lower(*given).compile()
    run = both if name == "nvfp4" else compiled  # JAX 0.10.2 takes no arrays of 4-bit floats ahead of time
    close(run(*given), want, 1e-4)
    assert_lean(compiled.as_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("e"), P(None, "e")], ids=["m", "k"])
def test_quantized_rows(kind, spec):
    """mxfp8 rows are multiplied by their scales where they are, also if k is divided."""
    mesh, rng = mesh_of(kind, (4,)), np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((M, 128), (G, 128, 16)))
    rows = tr.quant.quantize(x, "mxfp8", (1, 32))
    want = tr.grouped_matmul(rows, w, SIZES)
    of_k = P(None, *spec[1:])  # weights are divided like rows
    given = jax.tree.map(lambda leaf: put(mesh, leaf, spec), rows), put(mesh, w, of_k)
    close([jax.jit(lambda x, w: tr.grouped_matmul(x, w, SIZES))(*given)], [want], 1e-4)


@functools.cache
def by_blocks(sizes):
    """A product for each block of rows, and the gradients of all of them."""
    sizes = np.frombuffer(sizes, int).reshape(-1, G)

    def parts(x, w, bias, **options):
        one = functools.partial(tr.grouped_matmul, activation=jnp.tanh, bias=bias, **options)
        return jnp.concatenate([one(x, w, each) for x, each in zip(jnp.split(x, len(sizes)), sizes, strict=True)])

    return on_one_device(parts, *arrays()[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_each_shard_of_rows_has_sizes_of_its_own(kind):
    """Sizes [blocks, g], sharded as the rows: as many products as blocks, and their gradients."""
    x, w, bias, _ = arrays()
    sizes = np.array([[1, 0, 2, 0, 0, 5, 0, 0], [0, 3, 0, 1, 0, 0, 0, 3]])
    mesh, rows = mesh_of(kind, (2, 2)), P("e" if kind == AxisType.Explicit else "d")  # also over the axis of the groups
    given = [put(mesh, x, rows), put(mesh, w, P("e")), put(mesh, bias, P("e"))]
    got = step(lambda x, w, b: tr.grouped_matmul(x, w, jnp.asarray(sizes), bias=b, activation=jnp.tanh))(*given)
    close(got, by_blocks(sizes.tobytes()))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, rows), 2)
    with pytest.raises(ValueError, match=r"\[blocks, g\] where the blocks divide m = 16; got shape \(3, 8\)"):
        tr.grouped_matmul(x, w, sizes[[0, 1, 0]])
    with pytest.raises(ValueError, match="must sum to at most m = 8 rows"):
        tr.grouped_matmul(x, w, sizes + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_shard_of_the_rows_of_a_contraction_has_sizes_of_its_own(kind):
    """The sum over blocks; each device adds up those that it has, and keeps its groups where they are to be sharded."""
    (x, w, _, y), contract = arrays(), functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True)
    sizes = jnp.array([[1, 0, 1, 0, 2, 0, 0, 0], [0, 3, 0, 1, 0, 0, 0, 0]] * 2)

    def parts(x, y, w, **options):
        blocks = zip(jnp.split(x, 4), jnp.split(y, 4), sizes, strict=True)
        return w + sum(contract(*block, **options) for block in blocks)

    mesh = mesh_of(kind, (2, 4))
    given = put(mesh, x, P("d")), put(mesh, y, P("d")), put(mesh, w, P("e"))
    compiled = step(lambda x, y, w: contract(x, y, sizes, existing_out=w)).lower(*given).compile()
    value, gradients = compiled(*given)
    close((value, gradients), on_one_device(parts, x, y, w))
    assert_lean(compiled.as_text())
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, P("e")), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_over_devices(kind):
    """The sizes themselves are sharded over groups; they are small, and every device needs all of them."""
    x, w, *_ = arrays()
    sizes = put(mesh_of(kind, (2,)), jnp.asarray(SIZES), P("e"))
    slope = jax.jit(jax.grad(lambda x, sizes: tr.grouped_matmul(x, w, sizes, activation=jnp.tanh).sum()))
    close(slope(x, sizes), slope(x, SIZES))
    metadata = functools.partial(tr.make_group_metadata, m=M, tm=4, start_group=0, num_nonzero_groups=G)
    for call in (lambda s: metadata(group_sizes=s), lambda s: tr.grouped_dense(x, w, s)):
        with tr.debug_checks():
            jax.eval_shape(checkify.checkify(call), sizes)


def test_a_dimension_over_a_part_of_an_axis():
    """XLA shards the halves of k over one half of an axis, and each half over the other."""
    x, w, *_ = arrays()
    mesh, factors = mesh_of(AxisType.Auto, (4,)), jnp.array([1.0, 3.0])[:, None, None]
    call = lambda x, w: tr.grouped_matmul(x, (w.reshape(G, 2, K // 2, N) * factors).reshape(G, K, N), SIZES)
    close(jax.jit(call)(x, put(mesh, w, P(None, "e"))), call(x, w))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_a_scan_with_remat_and_vmap(rng, kind):
    x, weights = arrays()[0], jnp.asarray(rng.normal(size=(2, G, K, K)), jnp.float32) / 3
    mesh = mesh_of(kind, (2, 4))

    def layers(x, weights, **options):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(tr.grouped_matmul(x, w, SIZES, **options)), None))
        return jax.lax.scan(layer, x, weights)[0]

    several = lambda xs, weights, **options: jax.vmap(lambda x: layers(x, weights, **options))(xs)
    xs = jnp.stack([x, 2 * x])
    got = step(several)(put(mesh, xs, P(None, "d")), put(mesh, weights, P(None, "e")))
    close(got, on_one_device(several, xs, weights), 1e-4)


def test_vmap_of_a_sharded_axis():
    """Entries that are on a device stay there, with matrices and sizes of their own or without."""
    x, w, *_ = arrays()
    mesh = mesh_of(AxisType.Explicit, (2,), ("d",))
    xs, ws, sizes = jnp.stack([x, 2 * x]), jnp.stack([w, 3 * w]), jnp.stack([SIZES, SIZES[::-1]])
    call = jax.jit(lambda xs, ws, sizes: step(lambda xs, ws: jax.vmap(tr.grouped_matmul)(xs, ws, sizes))(xs, ws))
    one = lambda xs, ws, **options: jnp.stack([
        tr.grouped_matmul(xs[0], ws[0], SIZES, **options), tr.grouped_matmul(xs[1], ws[1], SIZES[::-1], **options),
    ])  # fmt: skip
    want = on_one_device(one, xs, ws)
    got = call(*(put(mesh, each, P("d")) for each in (xs, ws, sizes)))
    close(got, want)
    assert jax.typeof(got[0]).sharding.spec == P("d", None, None)
    partly = mesh_of(AxisType.Explicit, (2, 2))  # the batch over one of two explicit axes
    shared = jax.jit(jax.vmap(tr.grouped_matmul, in_axes=(0, None, None)))
    given = put(partly, xs, P("d")), put(partly, w, P()), SIZES
    close(shared(*given), shared(xs, w, SIZES))
    assert jax.typeof(shared(*given)).sharding.spec == P("d", None, None)
    assert "all-gather" not in shared.lower(*given).compile().as_text()
    automatic = mesh_of(AxisType.Auto, (2, 2))
    close(call(put(automatic, xs, P("d")), put(automatic, ws, P("d", "e")), put(automatic, sizes, P("d"))), want)


@pytest.mark.parametrize(("kind", "specs"), sweep(
    [(kind, specs) for kind in KINDS for specs in (
        (P("e"), P("e"), P("e")), (P(None, None, "e"), P(None, None, "e"), P(None, "e")),
        (P("e", None, "d"), P("e", None, "d"), P("e", "d")),
    )],
    [(AxisType.Auto, (P("e"), P("e"), P("e")))],
))  # fmt: skip
def test_a_moe_layer(rng, kind, specs):
    mesh = mesh_of(kind, (2, 4))
    tokens, logits = (jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(2))
    experts = [jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for shape in ((G, 8, 16), (G, 8, 16), (G, 16, 8))]
    layer = lambda x, logits, *experts, **options: tr.moe_mlp(x, tr.moe.route(logits, 2), *experts, **options)
    given = [
        put(mesh, tokens, P("d")),
        put(mesh, logits, P("d")),
        *(put(mesh, *each) for each in zip(experts, specs, strict=True)),
    ]
    compiled = step(layer).lower(*given).compile()
    value, gradients = compiled(*given)
    close((value, gradients), on_one_device(layer, tokens, logits, *experts), 1e-4)
    assert_lean(compiled.as_text())
    wanted = [P("d"), gradients[1].sharding.spec, *specs]
    assert all(
        x.sharding.is_equivalent_to(NamedSharding(mesh, s), x.ndim) for x, s in zip(gradients, wanted, strict=True)
    )
    assert kind == AxisType.Auto or jax.typeof(value).sharding.spec == P("d", None)


def test_sharded_makes_automatic_axes_explicit():
    x, w, *_ = arrays()
    mesh = mesh_of(AxisType.Auto, (2, 2))
    call = tr.sharded(mesh, P("d"), P("e"), P())(tr.grouped_matmul)
    program = step(lambda x, w: call(x, w, SIZES))
    for given in ((x, w), (put(mesh, x, P("d")), put(mesh, w, P("e")))):
        value, gradients = program(*given)
        close((value, gradients), (expected("plain")[0], expected("plain")[1][:2]))
        assert gradients[1].sharding.is_equivalent_to(NamedSharding(mesh, P("e")), 3)
    close(call(x, w, SIZES, preferred_element_type=jnp.float32), expected("plain")[0])
    in_context = tr.sharded(None, P("d"), P("e"), P())(tr.grouped_matmul)
    with jax.set_mesh(mesh):
        close(in_context(x, w, SIZES), expected("plain")[0])
    with pytest.raises(ValueError, match=r"mesh: want a mesh, or one that jax.set_mesh has set"):
        in_context(x, w, SIZES)
    with pytest.raises(TypeError, match="specs: want one for each of 2 positional arguments; got 3"):
        call(x, w)
    with pytest.raises(ValueError, match="mesh: want automatic axes"):
        tr.sharded(mesh_of(AxisType.Explicit, (2,)), P())
    with pytest.raises(TypeError, match=r"specs: want a jax.sharding.PartitionSpec for each argument; number 1 is 'e'"):
        tr.sharded(mesh, P(), "e")


GLOBAL = {}


def test_a_sharded_function_may_read_what_changes():
    closed = {}
    for held, function in ((closed, lambda x: x * closed["factor"]), (GLOBAL, lambda x: x * GLOBAL["factor"])):
        call = tr.sharded(mesh_of(AxisType.Auto, (2, 2)), P("d"))(function)
        for held["factor"] in (2, 3):
            np.testing.assert_array_equal(call(np.ones(4)), np.full(4, held["factor"]))
        slope = jax.grad(lambda a, held=held, call=call: held.update(factor=a) or call(np.ones(4)).sum())(5.0)
        assert slope == 4


def test_a_layer_of_a_sharded_function_may_read_what_changes():
    """The function is one of this package, and the activation in the description of its layer is not."""
    config = tr.moe.Config(d=2, f=2, experts=2, k=1, activation=lambda gate, up: gate * up * GLOBAL["factor"])
    params, x = tr.moe.init(jax.random.key(0), config), np.ones((4, 2), np.float32)
    call = tr.sharded(mesh_of(AxisType.Auto, (2, 2)), P(), P("d"))(tr.moe.apply)
    found = []
    for GLOBAL["factor"] in (1.0, 2.0):
        found.append(np.asarray(call(params, x, config=config)[0]))
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-6)


def test_without_a_mesh_nothing_changes():
    """One equation, as ever; and a mesh of one device is a mesh."""
    x, w, *_ = arrays()
    names = [each.primitive.name for each in jax.make_jaxpr(lambda x, w: tr.grouped_matmul(x, w, SIZES))(x, w).eqns]
    assert names.count("grouped_matmul") == 1 and not {"shard_map", "jit", "sharded_alike", "reshard"} & set(names)
    for kind in KINDS:
        mesh = mesh_of(kind, (1,))
        call = jax.jit(tr.grouped_matmul)
        given = put(mesh, x, P("e")), put(mesh, w, P("e"))
        close(call(*given, SIZES), expected("plain")[0])
        close(call(*given, put(mesh, SIZES[None], P("e"))), expected("plain")[0])


def test_an_exported_program_on_automatic_axes():
    """An exported program cannot call Python while it is compiled: XLA divides the loops that it consists of."""
    x, w, *_ = arrays()
    mesh = mesh_of(AxisType.Auto, (2,))
    given = put(mesh, x, P()), put(mesh, w, P("e")), put(mesh, jnp.asarray(SIZES), P())
    exported = jax.export.deserialize(jax.export.export(jax.jit(tr.grouped_matmul))(*given).serialize())
    close(jax.jit(exported.call)(*given), expected("plain")[0])


# ---------------------------------------------------------------------------------------------------------------------
# Accelerators, ahead of time


def structs(mesh, lhs, rhs):
    shapes = ((256, 128), lhs, jnp.bfloat16), ((8, 128, 256), rhs, jnp.bfloat16), ((8,), P(), jnp.int32)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, spec, dtype in shapes]


def training(x, w, sizes):
    call = lambda x, w: tr.grouped_matmul(x, w, sizes, x.dtype)
    return call(x, w), jax.grad(lambda x, w: jnp.sum(call(x, w).astype(jnp.float32) ** 2), (0, 1))(x, w)


TPUS = [(chip, layout) for chip in ("v5e:2x2", "v6e:2x2") for layout in ("g", "k", "n", "m and g", "m, g and g")]


@pytest.mark.parametrize(("topology", "layout"), sweep(TPUS, [TPUS[0], TPUS[6]]))
def test_tpu_kernels_on_explicit_axes(monkeypatch, topology, layout):
    for name, value in {**ENVIRONMENT, "TPU_LOG_DIR": "disabled"}.items():
        monkeypatch.setenv(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices).reshape(2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    text = jax.jit(training).lower(*structs(mesh, *LAYOUTS[layout][:2])).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert_lean(text)


@pytest.mark.parametrize("layout", sweep(["g", "k", "n", "m and g"], ["m and g"]))
def test_hopper_kernels_on_explicit_axes(layout):
    mesh = mesh_of(AxisType.Explicit, (2, 2))
    with tr.target("h200"):
        lowered = jax.jit(training).trace(*structs(mesh, *LAYOUTS[layout][:2])).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3


def test_a_mesh_without_devices():
    mesh = jax.sharding.AbstractMesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh), tr.target("v6e"):
        lowered = jax.jit(training).trace(*structs(mesh, P("d"), P("e"))).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3
