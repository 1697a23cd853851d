"""Serve a small Mixture-of-Experts language model with int4 experts: a decode loop, its speed, and the error.

    python examples/serve_moe.py [--load model.npz] [--batch 8] [--tokens 64] [--quick]

`train_moe.py --save model.npz` makes the model; without one, the weights are random. A decoding step has few rows and
reads the weights of all experts that they go to, so on an accelerator its time is proportional to the bytes of the
weights. On a CPU they are converted to float32 one expert at a time: int4 experts are smaller there, but not faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import train_moe
from train_moe import Model, Params

from trencadis import quant

EXPERTS = ("w_gate", "w_up", "w_down")


def unstacked(model: Model, params: Params) -> Params:
    """The same parameters with a list of layers in place of stacked ones."""
    layers = [jax.tree.map(operator.itemgetter(i), params["layers"]) for i in range(model.layers)]
    return {**params, "layers": layers}


@jax.jit
def quantized(params: Params) -> Params:
    """The same parameters with int4 experts: a scale for every 128 numbers of a column, stored for products."""

    def layer(weights: Params) -> Params:
        stored = {name: quant.quantize(weights["moe"][name], "int4", (1, 128, 1)) for name in EXPERTS}
        return {**weights, "moe": {**weights["moe"], **stored}}

    return {**params, "layers": [layer(weights) for weights in params["layers"]]}


def megabytes(params: Params) -> float:
    """The size of the experts of all layers; a 4-bit number is half a byte."""
    return sum(weights["moe"][name].nbytes for weights in params["layers"] for name in EXPERTS) / 1e6


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Model, params: Params, bias: jax.Array, text: jax.Array) -> jax.Array:
    """The logits of the next character after each character of texts [b, s]."""
    return train_moe.forward(model, params, bias, text, train_moe.empty_cache(model, text.shape[0]))[0]


def decode(model: Model, params: Params, bias: jax.Array, prompt: jax.Array, tokens: int) -> tuple[np.ndarray, float]:
    """The texts that the model writes after the prompts, and how many tokens it writes in a second."""
    run = functools.partial(train_moe.generate, model, params, tokens, bias, prompt, jax.random.key(2))
    written, times = np.asarray(run()), []  # compiles
    for _ in range(3):
        began = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - began)
    return written, written.size / min(times)


def main(argv: Sequence[str] | None = None) -> None:
    ask = argparse.ArgumentParser(description="Decode with int4 experts.")
    ask.add_argument("--load", type=pathlib.Path, help="a model of train_moe.py; default: random weights")
    ask.add_argument("--batch", type=train_moe.positive, default=8, help="texts at a time; default: %(default)s")
    ask.add_argument("--tokens", type=train_moe.positive, default=54, help="tokens of each; default: %(default)s")
    ask.add_argument("--quick", action="store_true", help="a tiny model")
    asked = ask.parse_args(argv)
    if asked.load:
        model, characters, params, bias = train_moe.load(asked.load)
    else:
        text, characters = train_moe.corpus()
        model = Model(vocabulary=len(characters), d=256, f=512)
        if asked.quick:
            model = dataclasses.replace(model, layers=1, experts=4, d=128, f=128)
        params, bias = train_moe.init(jax.random.key(0), model), jnp.zeros((model.layers, model.experts))
    tokens = asked.tokens
    if tokens > model.length - 10:
        ask.error(
            f"--tokens: want at most {model.length - 10}, the length of the model without the prompt; got {tokens}"
        )
    prompt = jnp.asarray(np.tile([[characters.index(c) for c in "A grouped "]], (asked.batch, 1)), jnp.int32)
    params = unstacked(model, params)
    small = quantized(params)
    print(f"{model}, {asked.batch} texts of {tokens} tokens")
    for name, each in (("float32", params), ("int4", small)):
        written, speed = decode(model, each, bias, prompt, tokens)
        print(f"{name:8} experts of {megabytes(each):7.2f} MB: {speed:7.0f} tokens/s")
    print("a text:  A grouped " + "".join(characters[i] for i in written[0]))
    text = jnp.concatenate([prompt, jnp.asarray(written)], axis=1)
    want, got = (logits_of(model, each, bias, text) for each in (params, small))
    off = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
    agree = jnp.mean(jnp.argmax(got, axis=-1) == jnp.argmax(want, axis=-1))
    print(f"int4 against float32, on this text: logits off by {off:.1%}, the same likeliest character in {agree:.0%}")
    assert off < 0.5, off


if __name__ == "__main__":
    main()
