"""Bad input: the error names the argument, what came, what is wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr

pytestmark = pytest.mark.core

gmm, tgmm, metadata = tr.grouped_matmul, tr.transposed_grouped_matmul, tr.make_group_metadata
x, w, y = (jnp.asarray(np.ones(shape, np.float32)) for shape in ((8, 4), (3, 4, 2), (8, 2)))
s = jnp.array([3, 0, 5])


@pytest.mark.parametrize(
    "error, words, call",
    [
        (ValueError, ["lhs", "2 dimensions [m, k]", "(4,)"], lambda: gmm(x[0], w, s)),
        (ValueError, ["rhs", "3 dimensions [g, k, n]", "(4, 2)"], lambda: gmm(x, w[0], s)),
        (ValueError, ["rhs", "[g, n, k]"], lambda: gmm(x, w[0], s, transpose_rhs=True)),
        (ValueError, ["rhs", "k = 4", "(3, 2, 4)", "wants transpose_rhs=True"], lambda: gmm(x, w.swapaxes(1, 2), s)),
        (ValueError, ["rhs", "k = 4", "transpose_rhs=True"], lambda: gmm(x, w, s, transpose_rhs=True)),
        (ValueError, ["rhs", "3 groups", "only 2"], lambda: gmm(x, w, s[:2])),
        (ValueError, ["group_sizes", "1 dimension", "(1, 1, 3)"], lambda: gmm(x, w, s[None, None])),
        (TypeError, ["group_sizes", "integer", "float32"], lambda: gmm(x, w, s.astype(float))),
        (ValueError, ["group_sizes", "group 1", "-1"], lambda: gmm(x, w, [3, -1, 5])),
        (ValueError, ["group_sizes", "m = 8", "sum of 9"], lambda: gmm(x, w, [3, 1, 5])),
        (ValueError, ["group_sizes", "sum of 4294967294"], lambda: gmm(x, w, np.array([2**31 - 1, 2**31 - 1, 0]))),
        (ValueError, ["group_offset", "()", "(2,)"], lambda: gmm(x, w, s, group_offset=jnp.zeros(2, int))),
        (TypeError, ["group_offset", "integer", "float32"], lambda: gmm(x, w, s, group_offset=jnp.array(1.0))),
        (ValueError, ["group_offset", "[1, 4)", "3 groups"], lambda: gmm(x, w, s, group_offset=1)),
        (ValueError, ["group_offset", "[-1, 2)"], lambda: gmm(x, w, s, group_offset=-1)),
        (ValueError, ["existing_out", "(8, 2)", "(8, 3)"], lambda: gmm(x, w, s, existing_out=jnp.ones((8, 3)))),
        (ValueError, ["existing_out", "float32", "bfloat16"], lambda: gmm(x, w, s, existing_out=y.astype(jnp.bfloat16))),
        (TypeError, ["existing_out", "float"], lambda: gmm(x, w, s, existing_out=1.0)),
        (ValueError, ["bias", "(3, 2)", "(2,)"], lambda: gmm(x, w, s, bias=jnp.ones(2))),
        (ValueError, ["activation", "existing_out"], lambda: gmm(x, w, s, existing_out=y, activation=jnp.tanh)),
        (ValueError, ["activation", "one number"], lambda: gmm(x, w, s, activation=jax.nn.softmax)),
        (ValueError, ["activation", "one number"], lambda: gmm(x, w, s, activation=lambda z: jnp.stack([z, z]))),
        (TypeError, ["activation", "relu"], lambda: gmm(x, w, s, activation="relu")),
        (TypeError, ["activation", "relu", "..."], lambda: gmm(x, w, s, activation=jnp.tanh(x))),  # not all of it
        (ValueError, ["backend", "'xla'", "'cutlass'"], lambda: gmm(x, w, s, backend="cutlass")),
        (ValueError, ["tiling", "(0, 1, 1)"], lambda: gmm(x, w, s, tiling=(0, 1, 1))),
        (ValueError, ["tiling", "tm, tk, tn", "128"], lambda: gmm(x, w, s, tiling=128)),
        (ValueError, ["tiling", "(128, 128)"], lambda: gmm(x, w, s, tiling=(128, 128))),
        (ValueError, ["tiling", "tk", "2.5"], lambda: gmm(x, w, s, tiling=(1, 2.5, 1))),
        (ValueError, ["precision", "'best'"], lambda: gmm(x, w, s, precision="best")),
        (TypeError, ["preferred_element_type", "'float31'"], lambda: gmm(x, w, s, "float31")),
        (TypeError, ["preferred_element_type", "bool"], lambda: gmm(x, w, s, bool)),
        (TypeError, ["lhs", "bool"], lambda: gmm(x > 0, w, s)),
        (TypeError, ["lhs", "array", "NoneType"], lambda: gmm(None, w, s)),
        (TypeError, ["rhs", "array", "str"], lambda: gmm(x, "w", s)),
        (TypeError, ["transpose_rhs", "'yes'"], lambda: gmm(x, w, s, transpose_rhs="yes")),
        (TypeError, ["interpret", "1"], lambda: gmm(x, w, s, interpret=1)),
        (ValueError, ["lhs", "[k, m]"], lambda: tgmm(x[0], y, s)),
        (ValueError, ["lhs", "last dimension", "m = 8", "(8, 4)"], lambda: tgmm(x, y, s)),
        (ValueError, ["lhs", "first", "m = 8"], lambda: tgmm(x.T, y, s, transpose_lhs=True)),
        (ValueError, ["rhs", "[m, n]"], lambda: tgmm(x.T, w, s)),
        (ValueError, ["num_actual_groups", "0 to 3", "4"], lambda: tgmm(x.T, y, s, num_actual_groups=4)),
        (ValueError, ["group_offset", "0 to 3", "5"], lambda: tgmm(x.T, y, s, group_offset=5)),
        (ValueError, ["num_actual_groups", "traced"], lambda: jax.jit(lambda o: tgmm(x.T, y, s, group_offset=o))(1)),
        (ValueError, ["existing_out", "(3, 4, 2)"], lambda: tgmm(x.T, y, s, existing_out=y)),
        (ValueError, ["group_sizes", "m = 8", "9"], lambda: tgmm(x.T, y, [4, 5, 0])),
        (ValueError, ["group_offset", "4294967296"], lambda: gmm(x, w, s, group_offset=2**32)),
        (ValueError, ["group_sizes", "sum of 9"], lambda: jax.jit(lambda x: gmm(x, w, [3, 1, 5]))(x)),
        (ValueError, ["num_actual_groups", "0 to 3", "2.7"], lambda: tgmm(x.T, y, s, num_actual_groups=2.7)),
        (ValueError, ["num_actual_groups", "True"], lambda: tgmm(x.T, y, s, num_actual_groups=True)),
        (ValueError, ["num_nonzero_groups", "0 to 3", "7"], lambda: metadata(group_sizes=s, m=8, tm=4, start_group=0, num_nonzero_groups=7)),
        (ValueError, ["start_group", "[2, 4)", "3 groups"], lambda: metadata(group_sizes=s, m=8, tm=4, start_group=2, num_nonzero_groups=2)),
        (ValueError, ["group_sizes", "m = 7", "8"], lambda: metadata(group_sizes=s, m=7, tm=4, start_group=0, num_nonzero_groups=3)),
        (TypeError, ["preferred_element_type", "complex64", "float32"], lambda: gmm(x.astype(jnp.complex64), w, s)),
        (ValueError, ["activation", "complex64", "float32"], lambda: gmm(x, w, s, activation=lambda z: z + 1j)),
        (ValueError, ["activation", "scalar int32"], lambda: gmm(x.astype(jnp.int8), w.astype(jnp.int8), s, jnp.int32, activation=jax.nn.silu)),
        (TypeError, ["preferred_element_type", "'float33'"], lambda: gmm(x, w, s, "float33")),
        (TypeError, ["preferred_element_type", "0 and negative", "float8_e8m0fnu"], lambda: gmm(x.astype("float8_e8m0fnu"), w.astype("float8_e8m0fnu"), s, None)),
        (TypeError, ["bias", "complex64"], lambda: gmm(x, w, s, bias=jnp.ones((3, 2), jnp.complex64))),
        (ValueError, ["interpret", "'xla'"], lambda: gmm(x, w, s, interpret=True, backend="xla")),
        (TypeError, ["visit_empty_groups", "'no'"], lambda: metadata(group_sizes=s, m=8, tm=4, start_group=0, num_nonzero_groups=3, visit_empty_groups="no")),
        (ValueError, ["group_offset", "[99, 99)"], lambda: tr.ragged_dot_general(jnp.ones((4, 2, 3)), jnp.ones((4, 3, 5)), s[:2], jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], []), group_offset=99)),
        (ValueError, ["group_sizes", "64 bits", str(2**70)], lambda: gmm(x, w, [2**70, 1, 1])),
        (TypeError, ["lhs", "dtype object"], lambda: gmm(np.array(x, object), w, s)),
        (TypeError, ["group_offset", "'a'"], lambda: gmm(x, w, s, group_offset="a")),
        (ValueError, ["m:", "2**31", str(2**31)], lambda: metadata(group_sizes=s, m=2**31, tm=4, start_group=0, num_nonzero_groups=3)),
        (TypeError, ["tiling", "(m, k, n)"], lambda: gmm(x, w, s, tiling=lambda m: (m, m, m))),
        (ValueError, ["lhs", "transpose_lhs=True"], lambda: tgmm(x, y, s)),
        (ValueError, ["rhs", "2 groups", "3", "group_offset"], lambda: gmm(x, w[:2], s)),
        (ValueError, ["tm", "positive", "0"], lambda: metadata(group_sizes=s, m=8, tm=0, start_group=0, num_nonzero_groups=3)),
        (ValueError, ["m", "nonnegative", "-1"], lambda: metadata(group_sizes=s, m=-1, tm=4, start_group=0, num_nonzero_groups=3)),
    ],
)  # fmt: skip
def test_bad_input(error, words, call):
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value), raised.value
