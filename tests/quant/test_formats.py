"""Formats: what quantization may lose, from the smallest float32 to the largest, for each format and granularity."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweep import sweep

from trencadis.quant import FORMATS, Format, Scaled, dequantize, quantize
from trencadis.quant.formats import format_of

pytestmark = pytest.mark.core

SHAPE = G, K, N = 3, 40, 6
TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)
FREE = [name for name, each in FORMATS.items() if not each.block]
GRANULARITIES = ["tensor", "row", "column", "group", (0, 0, 1), (1, 32, 1), (1, 32, 4), (2, 7, 5)]
CASES = [(name, each) for each in GRANULARITIES for name in FREE]
CASES += [(name, each) for name in FORMATS if name not in FREE for each in (None, (1, FORMATS[name].block, 1))]


def entry_by_entry(q):
    """What a Scaled stands for, by the definition, in float64."""
    values, scale = (np.asarray(leaf).astype(np.float64) for leaf in (q.values, q.scale))
    total = 1.0 if q.total is None else float(q.total)
    blocks = (np.arange(size) // length for size, length in zip(q.shape, q.block, strict=True))
    return values * scale[np.ix_(*blocks)] * total if q.ndim else values * scale * total


def half_step(dtype, x):
    """Half the distance between the neighbours of x in a dtype."""
    if jnp.issubdtype(dtype, jnp.integer):
        return np.full(np.shape(x), 0.5)
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.clip(x, 0, float(info.max)))  # x = fraction * 2**exponent, the fraction from 0.5
    return 2.0 ** (np.maximum(exponent - 1, int(info.minexp)) - info.nmant - 1)


def check_scales(kind, q, absmax):
    """Scales are those of the definition, in float64; as float32 they are normal."""
    scale = np.asarray(q.scale).astype(np.float64)
    good = np.isfinite(absmax) & (absmax >= TINY)
    total = 1.0 if q.total is None else float(q.total)
    assert np.isnan(scale[~np.isfinite(absmax)]).all()
    assert (scale[absmax == 0] == 1).all()
    ideal = absmax[good] / kind.largest
    if kind.total:
        whole = absmax[np.isfinite(absmax)].max(initial=0)
        assert total == pytest.approx(max(whole / (6 * 448), TINY) if whole >= TINY else 1, rel=2**-21)
        least = np.maximum(2.0**-9, 2.0 ** np.ceil(np.log2(TINY / total)))
        ideal = np.clip(ideal / total, least, 448)
        assert (np.abs(scale[good] - ideal) <= half_step(kind.scales, ideal) * 1.0001).all()
    elif kind.scales == jnp.float8_e8m0fnu:
        exact = np.minimum(absmax[good], kind.reach) / kind.largest
        np.testing.assert_array_equal(scale[good], np.maximum(2.0 ** np.ceil(np.log2(exact)), TINY))
    else:
        np.testing.assert_allclose(scale[good], np.maximum(ideal, TINY), rtol=2**-21)
    assert (scale[good] * total >= TINY).all()


def check(format, x, q):
    """A number is off by half a step at most, and saturates where its scale was rounded down alone."""
    kind = FORMATS[format]
    counts = [np.arange(size) // length for size, length in zip(x.shape, q.block, strict=True)]
    absmax = np.zeros(q.scale.shape)
    with np.errstate(invalid="ignore"):
        np.maximum.at(absmax, np.ix_(*counts), np.abs(x.astype(np.float64)))
    check_scales(kind, q, absmax)
    fine = np.isfinite(absmax)[np.ix_(*counts)]
    back, want = entry_by_entry(q), np.abs(x.astype(np.float64))
    scale = (np.asarray(q.scale).astype(np.float64) * (1.0 if q.total is None else float(q.total)))[np.ix_(*counts)]
    with np.errstate(invalid="ignore"):
        off = half_step(kind.values, want / scale) * scale * 1.00001 + np.maximum(want - kind.largest * scale, 0)
        beyond = np.maximum(want - kind.reach, 0)  # the next number after that is 2**128
        assert (np.abs(back - x) <= np.maximum(off, beyond * 1.00001) + TINY)[fine].all()
    assert np.isnan(back[~fine]).all()
    found = np.asarray(dequantize(q))
    np.testing.assert_allclose(found, back, rtol=1e-6, atol=TINY)  # and so is finite where x is
    assert np.isfinite(found[fine]).all()


@functools.cache
def quantized(format, granularity):
    # with the emitters that users have: those that the tests have round float32 to float4 twice
    options = {"xla_backend_extra_options": ""} if "fp4" in format or "float4" in format else {}
    return jax.jit(lambda x: quantize(x, format, granularity), compiler_options=options)


@pytest.mark.parametrize(("format", "granularity"), sweep(CASES, CASES[::3]), ids=str)
@hypothesis.given(seed=st.integers(0, 2**16), power=st.integers(-44, 38), spread=st.booleans(), bad=st.integers(0, 4))
@hypothesis.example(seed=0, power=39, spread=False, bad=0)  # all of them saturate: the largest float32
@hypothesis.example(seed=0, power=-36, spread=False, bad=0)
@hypothesis.example(seed=0, power=-34, spread=True, bad=0)  # some scales of nvfp4 times their total are subnormal
@hypothesis.example(seed=0, power=38, spread=True, bad=1)
def test_numbers_are_off_by_half_a_step_of_their_block(format, granularity, seed, power, spread, bad):
    """At any magnitude, alike or mixed; what is not finite stays in its block, and nothing finite becomes Inf."""
    rng = np.random.default_rng(seed)
    magnitude = 10.0 ** (rng.uniform(-44, power, (G, K, 1)) if spread else power)
    x = np.clip(rng.normal(size=SHAPE) * magnitude, -HUGE, HUGE).astype(np.float32)
    for at in range(bad):
        x[0, 7 * at, at] = [np.nan, np.inf, -np.inf, 0][at]
    check(format, x, quantized(format, granularity)(x))


LONG = (2, 128, 64)  # XLA's maximum of so many numbers drops NaN on CPU


@pytest.mark.parametrize(
    "granularity", ["tensor", "row", "column", "group", (1, 32, 1), (1, 1, 32), (0, 48, 20)], ids=str
)
def test_a_block_with_nan_is_lost_as_a_whole_in_large_arrays_too(granularity, rng):
    x = rng.normal(size=LONG).astype(np.float32)
    slopes = jax.grad(lambda x: quantize(x, "int8", granularity).scales().sum())(x)  # of the largest of each block
    np.testing.assert_allclose(np.abs(slopes).sum(), quantize(x, "int8", granularity).scales().size / 127, rtol=1e-4)
    bad = np.zeros(LONG, bool)
    for at in ((1, 3, 3), (1, 100, 60)):
        x[at], bad[at] = np.nan, True
    x[0, 1, 1], bad[0, 1, 1] = np.inf, True
    q = quantize(x, "int8", granularity)
    blocks = np.indices(LONG) // np.reshape(q.block, (3, 1, 1, 1))
    number = np.ravel_multi_index(tuple(blocks), LONG)
    np.testing.assert_array_equal(np.isnan(q.dequantize()), np.isin(number, number[bad]))


SHARDED = [
    ("int8", (1, 8, 8), ("d", "e", None)),  # two devices for each block, of which they have a part
    ("int8", (1, 3, 8), ("d", None, "e")),  # with a shorter last block, on no device alone
    ("mxfp8", (1, 1, 32), (None, None, ("d", "e"))),
    ("mxfp4", (1, 32, 1), ("d", "e", None)),
]


@pytest.mark.parametrize(("format", "granularity", "spec"), SHARDED, ids=str)
def test_blocks_may_lie_on_several_devices(format, granularity, spec, rng):
    mesh = jax.make_mesh((2, 4), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    x = rng.normal(size=(8, 64, 64)).astype(np.float32)
    x[3, 40, 5] = np.nan
    with jax.set_mesh(mesh):
        q = quantize(jax.device_put(x, NamedSharding(mesh, P(*spec))), format, granularity)
        np.testing.assert_array_equal(q.dequantize(), quantize(x, format, granularity).dequantize())
        assert jax.typeof(q.values).sharding.spec == P(*spec)
        along = jax.device_put(x, NamedSharding(mesh, P(("d", "e"))))
        each = jax.vmap(lambda x: quantize(x, format, granularity[1:]).dequantize())(along)
    np.testing.assert_array_equal(each, q.dequantize())


@pytest.mark.parametrize(("format", "granularity"), [x for x in CASES if x[1] in ("column", (2, 7, 5), None)], ids=str)
@hypothesis.settings(max_examples=6)
@hypothesis.given(seed=st.integers(0, 2**16), power=st.integers(-20, 37))
def test_what_is_quantized_already_stays_as_it_is(format, granularity, seed, power):
    """Powers of two may become smaller, with larger values; what these stand for does not change."""
    x = np.random.default_rng(seed).normal(size=SHAPE) * 10.0**power
    once = quantized(format, granularity)(x.astype(np.float32))
    twice = quantized(format, granularity)(once.dequantize())
    if not FORMATS[format].block:
        np.testing.assert_array_equal(np.asarray(twice.values), np.asarray(once.values))
    np.testing.assert_allclose(entry_by_entry(twice), entry_by_entry(once), rtol=0 if "mx" in format else 2**-21)


@pytest.mark.parametrize("format", FORMATS)
def test_a_vector_of_every_magnitude(format):
    """From below the smallest normal float32 to the largest, each a block of its own, with its sign.

    nvfp4 has a factor of the whole array: numbers below half of the smallest value with the smallest scale become 0.
    """
    x = np.concatenate([10.0 ** np.arange(-44, 39), [HUGE, TINY, 3e38]]).astype(np.float32) * np.float32(-1)
    q = quantized(format, None if FORMATS[format].block else (1, 1))(x[:, None])
    check(format, x[:, None], q)
    back, least = np.asarray(q.dequantize()), 1e-37 if q.total is None else float(q.total) * 2.0**-9 * 0.5 / 2
    assert (back[np.abs(x) > least] < 0).all()
    assert q.total is None or (back[np.abs(x) < least] == 0).all()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_powers_of_two_are_no_larger_than_they_must_be(format):
    """Exactly: a block whose largest is that of the format has the scale 1, and the next float32 the scale 2."""
    largest = np.float32(FORMATS[format].largest)
    x = np.array([largest, np.nextafter(largest, np.float32(np.inf)), largest / 2, 1], np.float32)
    found = np.asarray(quantized(format, None)(x[:, None]).scale).astype(np.float32).ravel()
    assert found.tolist() == [1, 2, 0.5, 2.0 ** np.ceil(np.log2(1 / largest))]


@pytest.mark.parametrize("format", FREE)
def test_scalars_and_arrays_without_entries(format):
    kinds = [((), None)] + [
        (s, g) for s in ((0,), (0, 4), (3, 0, 4)) for g in ("tensor", "row", "group", (2,) * len(s))
    ]

    @jax.jit
    def call(x):
        made = [quantize(jnp.full(shape, x), format, granularity) for shape, granularity in kinds]
        return [(q, Scaled(q.values, q.scale, format, q.block).dequantize()) for q in made]

    found = call(-2.5)
    for (shape, _), (q, back) in zip(kinds, found, strict=True):
        assert q.shape == back.shape == shape and len(q.block) == q.scale.ndim == len(shape)
    assert float(found[0][1]) == pytest.approx(-2.5) and f"{format}[]" in repr(found[0][0])


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in FREE])
def test_block_formats_without_entries(format):
    shapes = (0,), (0, 64), (2, 0)
    made = jax.jit(lambda: [quantize(jnp.zeros(shape), format).dequantize() for shape in shapes])()
    assert tuple(x.shape for x in made) == shapes
    with pytest.raises(ValueError, match=f"format: {format} has blocks along an axis; want at least 1 dimension"):
        quantize(1.0, format)


@pytest.mark.parametrize("format", FREE)
def test_a_dtype_names_its_format(format):
    kind = FORMATS[format]
    assert format_of(getattr(jnp, format)) is format_of(kind.values) is format_of(kind) is kind
    assert quantize(jnp.ones(2), getattr(jnp, format)).format == format


UNKNOWN = ["int7", "", None, 8, int, ["int8"], jnp.float32, jnp.float8_e8m0fnu, jnp.uint8]


@pytest.mark.parametrize("format", [*UNKNOWN, Format(name="int8", values=np.dtype("int8"), largest=63)], ids=str)
def test_other_formats_are_refused(format):
    with pytest.raises(ValueError, match=r"format: want one of int8, .*nvfp4, or a dtype of that name; got"):
        quantize(jnp.ones(2), format)


def test_formats_print_what_they_are():
    assert repr(FORMATS["int4"]) == "Format(int4: int4 up to 7, float32 scales)"
    assert repr(FORMATS["nvfp4"]) == (
        "Format(nvfp4: float4_e2m1fn up to 6, float8_e4m3fn scales for blocks of 16, and a scale of the scales)"
    )
