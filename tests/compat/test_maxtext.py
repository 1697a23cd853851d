"""MaxText's gmm (S4-09): quantized training and gathered weights, by rules that look like `qwix.QtRule`."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from oracle import close
from stand_in import SIZES, M, N
from sweep import marked, sweep

from trencadis.compat import megablox
from trencadis.compat.maxtext import gmm
from trencadis.quant import Scaled, dequantize, quantize

INT8 = {"lhs_quantize_dtype": jnp.int8, "rhs_quantize_dtype": jnp.int8}


@dataclasses.dataclass
class Rule:
    weight_qtype: Any = None
    act_qtype: Any = None
    bwd_qtype: Any = None
    tile_size: Any = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: Any = None
    bwd_calibration_method: str = "absmax"
    disable_channelwise_axes: bool = False


def ruled(**fields):
    return {"use_qwix_quantization": True, "qwix_rule": Rule(**fields)}


FIXED = ruled(weight_qtype="int8", bwd_qtype="int8", weight_calibration_method="fixed,4")


def mine(x):
    """x with 0 in its unowned rows."""
    return np.where(np.arange(M)[:, None] < SIZES.sum(), x, 0)


def stands_for(x, w):
    """The dequantized rows and weights: one scale per row, and one per column that all groups share."""
    return dequantize(quantize(mine(x), "int8", "row")), dequantize(quantize(w, "int8", (0, 0, 1)))


@pytest.mark.parametrize("transposed", [False, marked(True)])
@pytest.mark.parametrize("options", [INT8, ruled(weight_qtype="int8", act_qtype=jnp.int8)])
def test_s4_09_forward_and_gradients(options, transposed, x, w, y):
    """S4-09, S4-10: gradients are straight-through, and products with the dequantized operands."""
    call = functools.partial(gmm, transpose_rhs=transposed, **options)
    stored = w.swapaxes(1, 2) if transposed else w
    out, pull = jax.vjp(jax.jit(lambda x, w: call(x, w, SIZES)), x, stored)
    d_x, d_w = pull(jnp.asarray(y))
    q, r = stands_for(x, w)
    close(out, oracle.rows(q, r, SIZES))
    close(d_x, oracle.rows(y, r, SIZES, transpose_rhs=True))
    close(d_w.swapaxes(1, 2) if transposed else d_w, oracle.contraction(q, y, SIZES))


@pytest.mark.parametrize("tiling", [(8, 4, 2), (8, 4, 2, 16, 6, 3, 24, 12, 5)])
def test_s4_09_gradients_that_are_quantized(tiling, x, w, y):
    """S4-09: nine tiles or three; within the error of 8 bits."""
    options = ruled(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    out, pull = jax.vjp(jax.jit(lambda x, w: gmm(x, w, SIZES, tiling=tiling, **options)), x, w)
    d_x, d_w = pull(jnp.asarray(y))
    q, r = stands_for(x, w)
    close(out, oracle.rows(q, r, SIZES))
    close(d_x, oracle.rows(y, r, SIZES, transpose_rhs=True), 2e-2)
    close(d_w, oracle.contraction(q, y, SIZES), 2e-2)


def test_s4_09_what_a_rule_calibrates(x, w):
    """S4-09: a fixed range has one scale and clips; a factor of absmax shrinks the range."""
    fixed = ruled(weight_qtype="int8", weight_calibration_method="fixed,-1,1")
    clipped = np.round(np.clip(w, -1, 1) * 127) / 127
    close(gmm(x, w, SIZES, **fixed), oracle.rows(x, clipped, SIZES))
    half = ruled(act_qtype="int8", act_calibration_method="absmax,0.5")
    scale = np.abs(x).max(1, keepdims=True) / 254
    close(gmm(x, w, SIZES, **half), oracle.rows(np.clip(np.round(x / scale), -127, 127) * scale, w, SIZES))
    coarse = ruled(weight_qtype="int8", disable_channelwise_axes=True)
    close(gmm(x, w, SIZES, **coarse), oracle.rows(x, dequantize(quantize(w, "int8", "tensor")), SIZES))


@pytest.mark.parametrize("transposed", [False, True])
def test_s4_10_a_fixed_range_is_that_of_the_gradient_times_scales(transposed, x, w, y):
    """S4-10: also if rows and weights have a single scale, as with a fixed range."""
    methods = {f"{name}_calibration_method": f"fixed,{at}" for name, at in (("act", 5), ("weight", 6), ("bwd", 0.05))}
    options = ruled(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", **methods)
    stored = w.swapaxes(1, 2) if transposed else w
    d_x, d_w = jax.vjp(lambda x, w: gmm(x, w, SIZES, transpose_rhs=transposed, **options), x, stored)[1](jnp.asarray(y))

    def fixed(x, bound):
        return np.clip(np.round(x.astype(np.float64) * 127 / bound), -127, 127) * bound / 127

    close(d_x, oracle.rows(fixed(y * 6 / 127, 0.05), fixed(w, 6) * 127 / 6, SIZES, transpose_rhs=True), 2e-3)
    want = oracle.contraction(fixed(x, 5) * 127 / 5, fixed(y * 5 / 127, 0.05), SIZES)
    close(d_w.swapaxes(1, 2) if transposed else d_w, want, 2e-3)


@functools.partial(jax.jit, static_argnums=0)
def value_and_vjp(f, x, w, cotangent):
    """The result of a function of two operands and its gradients, in one program."""
    out, pull = jax.vjp(f, x, w)
    return out, *pull(cotangent)


GATHERED = {"plain": {}, "int8": INT8, "fixed": FIXED}


@functools.cache
def unsharded(name, transposed):
    """The call that all shardings of the weights are compared with; the same function, so that it is compiled once."""
    call = functools.partial(gmm, transpose_rhs=transposed, **GATHERED[name])
    return lambda x, w: jnp.concatenate([call(x, w, SIZES)] * 2)


@pytest.mark.parametrize(
    ("name", "transposed", "dim"),
    sweep(
        itertools.product(GATHERED, [False, True], range(3)),
        [("plain", False, 1), ("plain", True, 2), ("int8", False, 0), ("int8", True, 1), ("fixed", False, 2)],
    ),
)
def test_s4_09_weights_are_gathered(name, transposed, dim, x, w, y):
    """S4-09: the result and the gradients are those of unsharded weights; check_vma is on."""
    options = GATHERED[name]
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = P(*("fsdp" if axis == dim else None for axis in range(3)))
    stored = w.swapaxes(1, 2) if transposed else w
    call = functools.partial(gmm, transpose_rhs=transposed, **options)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None), cut, P(None)), out_specs=P("fsdp"))
    def sharded(x, w, sizes):
        return call(x, w, sizes, weight_gather_axes=[("fsdp", dim)], lhs_vma_axes=("fsdp",))

    cotangent = np.concatenate([y, -2 * y])
    got, *gradients = value_and_vjp(lambda x, w: sharded(x, w, SIZES), x, stored, cotangent)
    want, *wanted = value_and_vjp(unsharded(name, transposed), x, stored, cotangent)
    close(got, np.asarray(want))
    # each shard quantizes its own gradient before they are summed
    for one, other in zip(gradients, wanted, strict=True):
        close(one, np.asarray(other), 2e-2 if "qwix_rule" in options else 1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_s4_09_shards_of_one_column_have_their_own_scales(transposed, x, w):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    w = w[:, :, :2] * np.array([1, 100], np.float32)
    call = functools.partial(gmm, transpose_rhs=transposed, **INT8)
    dim, cut = (-2, P(None, "fsdp")) if transposed else (-1, P(None, None, "fsdp"))
    specs = {"in_specs": (P(), cut, P()), "out_specs": P("fsdp")}
    sharded = jax.shard_map(functools.partial(call, weight_gather_axes=[("fsdp", dim)]), mesh=mesh, **specs)
    stored = w.swapaxes(1, 2) if transposed else w
    np.testing.assert_array_equal(jax.jit(sharded)(x, stored, SIZES)[:M], call(x, stored, SIZES))


def test_s4_09_weights_travel_as_bytes(x, w):
    """S4-09: weights are quantized before they are gathered."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    call = functools.partial(gmm, weight_gather_axes=[("fsdp", 1)], **INT8)
    specs = {"in_specs": (P(), P(None, "fsdp"), P()), "out_specs": P("fsdp")}
    text = jax.jit(jax.shard_map(call, mesh=mesh, **specs)).lower(x, w, SIZES).compile().as_text()
    gathered = [line for line in text.splitlines() if " all-gather" in line and "=" in line]
    assert gathered and all("s8[" in line for line in gathered)


def test_s4_09_partial_sums_and_existing_out(x, w, y):
    out = gmm(x, w, SIZES, jnp.bfloat16, partial_sum=y)
    close(out.astype(np.float32), oracle.rows(x, w, SIZES) + y, 5e-3)
    q, r = stands_for(x, w)
    close(gmm(x, w, SIZES, partial_sum=y, **INT8), oracle.rows(q, r, SIZES) + y)
    covered = np.arange(M)[:, None] < SIZES.sum()
    close(gmm(x, w, SIZES, existing_out=y, **INT8), np.where(covered, oracle.rows(q, r, SIZES), y))
    np.testing.assert_array_equal(gmm(x, w, SIZES, existing_out=y), megablox.gmm(x, w, SIZES, existing_out=y))
    np.testing.assert_allclose(jax.grad(lambda p: jnp.sum(gmm(x, w, SIZES, partial_sum=p, **INT8) * y))(y), y)


def test_unowned_rows_do_not_leak(x, w):
    spoilt = np.where(np.arange(M)[:, None] < SIZES.sum(), x, np.nan)
    options = ruled(act_qtype="int8", bwd_qtype="int8", disable_channelwise_axes=True)
    loss = lambda x: jnp.sum(gmm(x, w, SIZES, **options) ** 2)
    got, want = jax.value_and_grad(loss)(spoilt), jax.value_and_grad(loss)(mine(x))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("format", ["int8", marked("float8_e4m3fn")])
@pytest.mark.parametrize("which", ["act", "weight", "bwd"])
def test_nan_survives_a_fixed_range(which, format, x, w, y):
    """Integers have no NaN, so the scale is NaN: a NaN must not become a number."""
    x[2, 3] = np.nan if which == "act" else 1
    w[2, 3, 1] = np.nan if which == "weight" else 1
    y[2, 3] = np.nan if which == "bwd" else 1
    options = ruled(**{f"{which}_qtype": format, f"{which}_calibration_method": "fixed,4"})
    out, pull = jax.vjp(lambda x, w: gmm(x, w, SIZES, **options), x, w)
    d_x, d_w = pull(jnp.asarray(y))
    told = {"act": [out[2]], "weight": [out[7:13, 1]], "bwd": [d_x[2], d_w[0, :, 3]]}[which]
    assert all(np.isnan(each).all() for each in told)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_qwix_quantization": True}, "Expect a QtRule"),
        ({"qwix_rule": Rule("int8")}, "use_qwix_quantization=True"),
        (ruled(weight_qtype="int8", tile_size=128), "tile_size is not supported; got 128"),
        (ruled(weight_qtype="int8", weight_calibration_method="minmax"), "weight_calibration_method; got 'minmax'"),
        (ruled(act_qtype="int8", act_calibration_method="fixed,-1,2"), "act_calibration_method; got 'fixed,-1,2'"),
        (ruled(act_qtype="int8", act_calibration_method="fixed,1,-1"), "act_calibration_method; got 'fixed,1,-1'"),
        (ruled(bwd_qtype="int8", bwd_calibration_method="absmax,-1"), "bwd_calibration_method; got 'absmax,-1'"),
        (ruled(bwd_qtype="int8", bwd_calibration_method="absmax,all"), "bwd_calibration_method; got 'absmax,all'"),
        (ruled(weight_qtype="nf4"), "qwix_rule: weight_qtype: want one of int8, .*; got 'nf4'"),
        (ruled(act_qtype=3.5), "qwix_rule: act_qtype: want a dtype; got 3.5"),
        (ruled(act_qtype="int8", act_calibration_method=3), "act_calibration_method; got 3"),
        ({"lhs_quantize_dtype": "int8x"}, "^lhs_quantize_dtype: want one of int8, .*; got 'int8x'"),
        ({"rhs_quantize_dtype": jnp.float16}, "^rhs_quantize_dtype: want one of int8, .*; got 'float16'"),
        ({"rhs_quantize_dtype": object}, "^rhs_quantize_dtype: want one of int8, .*; got 'object'"),
        ({"weight_gather_axes": "fsdp"}, "weight_gather_axes: want pairs of a mesh axis and a dimension.*got 'fsdp'"),
        ({"weight_gather_axes": [("fsdp", 1.0)]}, "weight_gather_axes: want pairs"),
        ({"weight_gather_axes": [("fsdp", 3)]}, "weight_gather_axes: want pairs"),
        ({"partial_sum": np.zeros((1, M, N))}, r"partial_sum: want shape \(20, 8\)"),
        ({"partial_sum": np.zeros((M, N)), "existing_out": np.zeros((M, N))}, "want one of them"),
    ],
)
def test_what_is_refused(options, words, x, w):
    with pytest.raises(ValueError, match=words):
        gmm(x, w, SIZES, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lhs": np.ones((M, 12), np.int8), **INT8}, "lhs: want a float dtype to quantize; got int8"),
        ({"rhs": np.ones((4, 12, N), np.int8), **INT8}, "rhs: want a float dtype to quantize; got int8"),
        ({"transpose_rhs": "no", **INT8}, "transpose_rhs: want True or False"),
        ({"interpret": "no", **INT8}, "interpret: want True or False"),
        ({"use_qwix_quantization": "yes"}, "use_qwix_quantization: want True or False"),
        (ruled(weight_qtype="int8", disable_channelwise_axes="yes"), "disable_channelwise_axes: want True or False"),
        ({"lhs_vma_axes": "fsdp"}, "lhs_vma_axes: want a sequence of mesh axis names; got 'fsdp'"),
        ({"partial_sum": "zero"}, "partial_sum: want an array; got str"),
        ({"partial_sum": np.zeros((M, N), bool)}, "partial_sum: want a number dtype; got bool"),
        ({"preferred_element_type": "int8x", "partial_sum": np.zeros((M, N))}, "preferred_element_type: want a dtype"),
    ],
)
def test_wrong_types_are_refused_by_name(changes, words, x, w):
    with pytest.raises(TypeError, match=words):
        gmm(**{"lhs": x, "rhs": w, "group_sizes": SIZES, **changes})


def test_ranks_are_refused_as_by_megablox(x, w):
    for options in ({}, INT8):
        with pytest.raises(ValueError, match="Expected 3-tensor for 'rhs' but got 2-tensor"):
            gmm(x, w[0], SIZES, **options)


def test_scaled_operands_are_those_of_megablox(x, w):
    r = quantize(w, "int8", "column")
    assert isinstance(r, Scaled)
    close(gmm(x, r, SIZES), oracle.rows(x, dequantize(r), SIZES))
    for options in (INT8, {"weight_gather_axes": [("fsdp", 1)]}):
        with pytest.raises(TypeError, match="rhs: is quantized already"):
            gmm(x, r, SIZES, **options)
