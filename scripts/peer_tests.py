"""Run the tests that other libraries have for quantized `ragged_dot` against ours; needs tokamax and chex.

`python scripts/peer_tests.py` runs two sets of tests:

- tokamax installs its own tests; 240 of them have quantized qwix operands, with twenty pairs of tile shapes.
- qwix's tests are not in its wheel; their operands and tolerances are the table below.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import qwix
from absl.testing import absltest, parameterized
from tokamax._src import quantization
from tokamax._src.ops.ragged_dot import test_base

import trencadis as tr

assert_close = chex.assert_trees_all_close


def _close(*trees: Any, **limits: Any) -> None:
    assert_close(*trees, **({"atol": 1e-6} | limits))


def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any, activation: Any = None, **options: Any) -> jax.Array:
    """Our `ragged_dot` with tokamax's additional arguments: operands that are quantized inside, and an activation."""
    lhs, rhs = (quantization.as_array_or_qarray(x) for x in (lhs, rhs))
    out = tr.ragged_dot(lhs, rhs, group_sizes, **options)
    return out if activation is None else activation(out)


class TokamaxTest(test_base.RaggedDotTestBase):
    """The tests of tokamax's base class, run with our function."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, dot_fn=ragged_dot)

    def setUp(self) -> None:
        """Use the tolerance of tokamax's kernels by default, because sums in another order differ near 0."""
        super().setUp()
        self.enterContext(mock.patch.object(chex, "assert_trees_all_close", _close))

    def _test_bench(self, spec: Any) -> None:
        self.skipTest("shapes for accelerators")


def _how(qtype: Any, axes: tuple[int, ...] = (), tiles: dict[int, int] | None = None) -> dict[str, Any]:
    return {"qtype": qtype, "channelwise_axes": axes, "tiled_axes": tiles or {}}


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
EVEN, PAST, FEW = (64, 32, 16, 16), (128, 100, 0, 28), (10, 20, 30, 68)  # the second sums past m and is clamped


class QwixTest(parameterized.TestCase):
    """Our result is as close to the unquantized and to the dequantized product as qwix requires of its own."""

    @parameterized.parameters(
        (_how(jnp.int8), _how(jnp.int8), 64, EVEN, 0.03),
        (_how(E5M2, (0,)), _how(E5M2, (2,)), 64, PAST, 0.08),
        (_how(E5M2, (0,)), _how(E5M2, (0, 2)), 64, PAST, 0.08),
        (_how(jnp.int8), _how(jnp.int8, (0,)), 64, (128, 0, 0, 0), 0.03),
        (_how(jnp.int8), _how(jnp.int8, (), {1: 64}), 64, EVEN, 0.03),
        (_how(jnp.int8), _how(jnp.int8, (1,)), 64, EVEN, 0.03),
        (_how(E4M3, (0,)), _how(E4M3, (2,), {1: 128}), 512, FEW, 0.04),
        (_how(E4M3, (0,)), _how(E4M3, (0, 2), {1: 128}), 512, FEW, 0.04),
        (_how(E4M3, (0,)), _how(E4M3, (0,), {1: 128, 2: 128}), 512, FEW, 0.04),
        (_how(E4M3, (0,)), _how(E4M3, (0,), {1: 128, 2: 32}), 512, FEW, 0.04),
        (_how(E4M3, (0,), {1: 128}), _how(E4M3, (0,), {1: 128, 2: 128}), 512, FEW, 0.04),
    )
    def test_values(self, left: Any, right: Any, n: int, sizes: tuple[int, ...], limit: float) -> None:
        """Mean error over mean magnitude; 0.003 is the difference that qwix allows between its own two paths."""
        keys = jax.random.split(jax.random.key(42))
        x, w = jax.random.normal(keys[0], (128, 256)), jax.random.normal(keys[1], (4, 256, n))
        q, r = qwix.quantize(x, **left), qwix.quantize(w, **right)
        got = jax.jit(tr.ragged_dot)(q, r, jnp.array(sizes))
        exact = jax.lax.ragged_dot(x, w, jnp.array(sizes))
        meant = jax.lax.ragged_dot(qwix.dequantize(q), qwix.dequantize(r), jnp.array(sizes))
        self.assertEqual(got.dtype, exact.dtype)
        self.assertLessEqual(float(jnp.abs(got - exact).mean() / jnp.abs(exact).mean()), limit)
        self.assertLessEqual(float(jnp.abs(got - meant).mean() / jnp.abs(meant).mean()), 0.003)

    def test_zero_points_are_refused(self) -> None:
        """A zero point, which qwix would dequantize, is refused with an error."""
        q = qwix.quantize(jnp.ones((8, 4)), jnp.int8, calibration_method="minmax")
        with self.assertRaisesRegex(ValueError, "lhs: want a QArray without a zero_point"):
            tr.ragged_dot(q, jnp.ones((1, 4, 2)), jnp.array([8]))


if __name__ == "__main__":
    absltest.main()
