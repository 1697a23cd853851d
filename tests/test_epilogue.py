"""What follows the product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.epilogue import Epilogue, add, check_activation, elementwise

pytestmark = pytest.mark.core

F32 = np.dtype("float32")


def test_is_a_value_that_is_false_when_nothing_follows():
    assert not Epilogue()
    assert Epilogue(accumulate=True)
    assert Epilogue(bias=F32) == Epilogue(bias=F32) != Epilogue()
    assert str(Epilogue(bias=F32, activation=jnp.tanh)) == "bias + tanh"


def test_operands_come_in_order():
    assert Epilogue(bias=F32, accumulate=True).split(("b", "e")) == ("b", "e")
    assert Epilogue(accumulate=True).split(("e",)) == (None, "e")
    assert Epilogue(bias=F32).split(("b",)) == ("b", None)


def test_sums_hold_both():
    assert add(jnp.int32(2), jnp.bfloat16(0.5)) == 2.5
    assert add(jnp.bfloat16(1), jnp.bfloat16(1)).dtype == jnp.float32


def test_elementwise_by_construction():
    z = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(elementwise(lambda x: jnp.where(x > 2, x, -x))(z), jnp.where(z > 2, z, -z))
    with pytest.raises(ValueError, match="one number"):
        check_activation(jnp.cumsum, F32, F32)


def test_a_traced_value_inside_keeps_it_out_of_kernels():
    assert check_activation(jax.nn.gelu, F32, F32)
    seen = []
    jax.jit(lambda b: seen.append(check_activation(lambda z: z * b, F32, F32)) or b)(2.0)
    jax.grad(lambda b: seen.append(check_activation(lambda z: z * b, F32, F32)) or b)(2.0)
    assert seen == [False, False]
