"""What follows the product."""

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core.epilogue import Epilogue, Extras, add

pytestmark = pytest.mark.core

F32 = np.dtype("float32")


def test_is_a_value_that_is_false_when_nothing_follows():
    assert not Epilogue()
    assert Epilogue(accumulate=True)
    assert Epilogue(bias=F32) == Epilogue(bias=F32) != Epilogue()
    assert str(Epilogue(bias=F32, activation=jnp.tanh)) == "bias + tanh"


def test_a_bias_of_any_dtype_follows():
    """numpy thinks that its float64 is None."""
    assert Epilogue(bias=np.dtype("float64"))


def test_operands_come_in_order():
    r, c, b, e = map(jnp.float32, range(4))
    assert Epilogue(bias=F32, accumulate=True).split((b, e)) == (None, None, b, e)
    assert Epilogue(accumulate=True).split((e,)) == Extras(existing=e)
    assert Epilogue(by_column=True, bias=F32).split((c, b)) == Extras(by_column=c, bias=b)
    assert Epilogue(by_row=True, by_column=True, accumulate=True).split((r, c, e)).given == [r, c, e]


def test_sums_hold_both():
    assert add(jnp.int32(2), jnp.bfloat16(0.5)) == 2.5
    assert add(jnp.bfloat16(1), jnp.bfloat16(1)).dtype == jnp.float32
