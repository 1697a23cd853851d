"""Small kernels whose cost is known, and inspections of them that are done once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis import inspect as tpu

ANY = pl.BlockSpec(memory_space=pl.ANY)
f32, bf16 = jnp.float32, jnp.bfloat16


def array(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def copy(x):
    """Copies by hand, 128 rows at a time, through VMEM."""

    def body(x, y, buffer, sem):
        def step(i, _):
            for one in (
                pltpu.make_async_copy(x.at[pl.ds(i * 128, 128)], buffer, sem),
                pltpu.make_async_copy(buffer, y.at[pl.ds(i * 128, 128)], sem),
            ):
                one.start()
                one.wait()
            return 0

        jax.lax.fori_loop(0, x.shape[0] // 128, step, 0)

    scratch = [pltpu.VMEM((128, x.shape[1]), x.dtype), pltpu.SemaphoreType.DMA]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, in_specs=[ANY], out_specs=ANY, scratch_shapes=scratch, name="copy")(x)


def matmul(x, y, tile=256):
    """A product, by a grid that the compiler pipelines."""
    (m, k), n = x.shape, y.shape[1]

    def body(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=f32)

    return pl.pallas_call(
        body,
        grid=(m // tile, n // tile),
        in_specs=[pl.BlockSpec((tile, k), lambda i, j: (i, 0)), pl.BlockSpec((k, tile), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j: (i, j)),
        out_shape=array(m, n),
        name="matmul",
    )(x, y)


def first_tiles(sizes, x):
    """Doubles the tiles of 128 rows that sum(sizes) reaches into: as many steps as the numbers say."""
    tiles = (jnp.sum(sizes, dtype=jnp.int32) + 127) // 128

    def body(tiles, x, y, buffer, sem):
        def step(i, _):
            get = pltpu.make_async_copy(x.at[pl.ds(i * 128, 128)], buffer, sem)
            get.start()
            get.wait()
            buffer[...] = buffer[...] * 2
            put = pltpu.make_async_copy(buffer, y.at[pl.ds(i * 128, 128)], sem)
            put.start()
            put.wait()
            return 0

        jax.lax.fori_loop(0, tiles[0], step, 0)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[ANY],
        out_specs=ANY,
        scratch_shapes=[pltpu.VMEM((128, x.shape[1]), x.dtype), pltpu.SemaphoreType.DMA],
    )
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, grid_spec=spec, out_shape=shape, name="first_tiles")(tiles[None], x)


def led_by_data(x):
    """Halves a block until its sum is small: how often is not known before the numbers are there."""

    def body(x, y):
        y[...] = x[...]

        def halve(_):
            y[...] = y[...] / 2
            return jnp.sum(y[...])

        jax.lax.while_loop(lambda total: total > 1, halve, jnp.sum(x[...]))

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="led_by_data")(x)


@functools.cache
def copied(generation="v5e", rows=1024):
    return tpu.inspect(copy, array(rows, 1024), generation=generation)


@functools.cache
def multiplied(generation="v6e"):
    x = array(1024, 1024, dtype=bf16)
    return tpu.inspect(matmul, x, x, generation=generation, flops=2.0 * 1024**3)


@functools.cache
def visited(*sizes):
    return tpu.inspect(first_tiles, np.array(sizes, np.int32), array(2048, 512), generation="v6e")
