"""Layers, routings and parameters of few numbers, and what the tests of a layer do with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from tests.support import moe_oracle
from tests.support.sweep import sweep
from trencadis import moe

T, D, F, E = 8, 6, 5, 4
BACKENDS = pytest.mark.parametrize("backend", sweep(["reference", "xla"], ["reference"]))


def parameters(rng, experts=E, gate=True, bias=False):
    shapes = {"gate": (experts, D, F) if gate else None, "up": (experts, D, F), "down": (experts, F, D)}
    shapes |= {"bias_gate": (experts, F) if bias and gate else None, "bias_up": (experts, F) if bias else None}
    shapes["bias_down"] = (experts, D) if bias else None
    return {
        name: None if shape is None else jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def routings(rng):
    """Routings by name: even and uneven, empty experts, all to one, masked tokens, an expert twice, k up to all."""
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32)
    mask = jnp.arange(T) % 3 != 1
    return {
        "top2": moe.route(logits, 2),
        "top1": moe.route(logits, 1, normalize=False),
        "all": moe.route(logits, E, score="sigmoid"),
        "empty": moe.route(logits.at[:, 1].set(-100.0).at[:, 3].set(-100.0), 2),
        "one": moe.route(logits, 2, experts=jnp.tile(jnp.array([[2, E]]), (T, 1)), normalize=False),
        "masked": moe.route(logits, 2, mask=mask),
        "nobody": moe.route(logits, 2, mask=jnp.zeros(T, bool)),
        "twice": moe.route(logits, 2, experts=jnp.tile(jnp.array([[1, 1]]), (T, 1))),
    }


NAMES = ["top2", "top1", "all", "empty", "one", "masked", "nobody", "twice"]
DEFAULT = [name for name in NAMES if name != "top1"]  # each k is a program of its own


def call(routing, x, weights, params, **options):
    named = {name: params[name] for name in ("bias_gate", "bias_up", "bias_down")}
    routing = routing._replace(weights=weights)
    return tr.moe_mlp(x, routing, params["gate"], params["up"], params["down"], **named, **options)


def value_and_gradients(routing, x, params, ct, first=None, **options):
    return compiled(routing, x, routing.weights, params, ct, first, tuple(options.items()))


@functools.partial(jax.jit, static_argnames=("options",))
def compiled(routing, x, weights, params, ct, first, options):
    options = dict(options) | ({} if first is None else {"group_offset": first})
    out, pullback = jax.vjp(lambda *args: call(routing, *args, **options), x, weights, params)
    d_x, d_weights, d_params = pullback(ct)
    return out, {"x": d_x, "weights": d_weights, **d_params}


def same(found, wanted, tolerance=2e-5):
    for name, want in wanted.items():
        if want is not None:
            np.testing.assert_allclose(found[name], want, rtol=tolerance, atol=tolerance, err_msg=name)


def check(rng, routing, params, first=None, oracle=None, **options):
    x, ct = (jnp.asarray(rng.normal(size=(T, D)), jnp.float32) for _ in range(2))
    out, gradients = value_and_gradients(routing, x, params, ct, first, **options)
    want, wanted = moe_oracle.layer(x, routing.experts, routing.weights, params, ct, first=first or 0, **(oracle or {}))
    same({"out": out, **gradients}, {"out": want, **wanted})


def plain(routing, x, weights, params, activation=lambda gate, up: jax.nn.silu(gate) * up):
    """The layer over all experts, without the package."""
    experts = jnp.arange(params["up"].shape[0])
    combine = jnp.sum(jnp.where(routing.experts[:, :, None] == experts, weights[:, :, None], 0), axis=1)  # [t, e]
    named = {name: jnp.zeros((1, 1)) if p is None else p for name, p in params.items()}
    gate = jnp.einsum("td,edf->etf", x, params["gate"]) + named["bias_gate"][:, None]
    up = jnp.einsum("td,edf->etf", x, params["up"]) + named["bias_up"][:, None]
    y = jnp.einsum("etf,efd->etd", activation(gate, up), params["down"]) + named["bias_down"][:, None]
    return jnp.einsum("te,etd->td", combine, y)


def close(a, b):
    if getattr(a, "dtype", None) != jax.dtypes.float0:
        np.testing.assert_allclose(a, b, rtol=3e-4, atol=3e-4)
