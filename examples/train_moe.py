"""Train a small Mixture-of-Experts language model on the documentation of this repository, character by character.

    python examples/train_moe.py [--steps 1000] [--quick] [--experts-over 4] [--save model.npz] [--svg train_moe.svg]

It takes about three minutes on two CPU cores. A layer is causal attention and `moe.apply`. Experts are kept balanced by
a bias instead of a loss. `serve_moe.py` runs the saved model with int4 experts. With `--experts-over 4`, texts and
experts are sharded over four devices, which are virtual ones on a CPU; `train_moe_processes.py` runs the same in two
processes. All sums over devices are ordered, so that the losses do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trencadis import moe, moe_mlp, parallel

ROOT = pathlib.Path(__file__).resolve().parents[1]
RATE, WARM_UP, BALANCE = 3e-3, 10, 1e-2  # of the optimizer, in steps, and of the balance bias
BARS = " ▁▂▃▄▅▆▇█"
AXIS = "expert"  # the mesh axis over which texts and experts are sharded
Params = dict[str, Any]
Mlp = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of the model."""

    vocabulary: int
    layers: int = 3
    heads: int = 4
    length: int = 64  # the longest text, in characters
    d: int = 128
    f: int = 256
    experts: int = 16
    k: int = 2

    @property
    def moe(self) -> moe.Config:
        """The MoE layer of each block, with DeepSeek's scores."""
        return moe.Config(d=self.d, f=self.f, experts=self.experts, k=self.k, score="sigmoid")


class State(NamedTuple):
    """All that a training step changes."""

    params: Params
    bias: jax.Array  # [layers, experts]: no gradient changes it
    first: Params  # Adam's moments of the gradients
    second: Params
    step: jax.Array


# ---------------------------------------------------------------------------------------------------------------------
# The model


def init(key: jax.Array, model: Model) -> Params:
    """Random parameters; those of the layers are stacked, so that one loop body runs them all."""

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        attention = {"qkv": (model.d, 3 * model.d), "out": (model.d, model.d)}
        weights = {name: normal(k, shape) for (name, shape), k in zip(attention.items(), keys, strict=False)}
        return {**weights, "moe": moe.init(keys[2], model.moe)}

    def normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    keys = jax.random.split(key, 2 + model.layers)
    return {
        "embedding": 0.05 * jax.random.normal(keys[0], (model.vocabulary, model.d)),
        "position": 0.05 * jax.random.normal(keys[1], (model.length, model.d)),
        "layers": jax.vmap(layer)(keys[2:]),
    }


def empty_cache(model: Model, batch: int) -> jax.Array:
    """Room for the keys and values of each layer: [layers, batch, length, 2, heads, d / heads]."""
    return jnp.zeros((model.layers, batch, model.length, 2, model.heads, model.d // model.heads))


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attention(layer: Params, x: jax.Array, cache: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Causal attention of tokens [b, s, d] at the positions from `at` on, to those and to what the cache holds."""
    b, s, d = x.shape
    length, heads = cache.shape[1], cache.shape[3]
    q, kv = jnp.split(x @ layer["qkv"], [d], axis=-1)
    q = q.reshape(b, s, heads, -1)
    cache = jax.lax.dynamic_update_slice(cache, kv.reshape(b, s, 2, heads, -1), (0, at, 0, 0, 0))
    scores = jnp.einsum("bshc,blhc->bhsl", q, cache[:, :, 0]) * (d // heads) ** -0.5
    seen = jnp.arange(length) <= at + jnp.arange(s)[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhsl,blhc->bshc", shares, cache[:, :, 1]).reshape(b, s, d) @ layer["out"], cache


def forward(
    model: Model,
    params: Params,
    bias: jax.Array,
    tokens: jax.Array,
    cache: jax.Array,
    at: jax.Array | int = 0,
    mlp: Mlp = moe_mlp,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [b, s, vocabulary] of the next characters, rows of each expert [layers, experts], and the cache."""
    position = jax.lax.dynamic_slice_in_dim(params["position"], at, tokens.shape[1])

    def layer(x: jax.Array, each: Any) -> tuple[jax.Array, Any]:
        weights, bias, cache = each
        mixed, cache = attention(weights, normalized(x), cache, jnp.asarray(at))
        x = x + mixed
        y, routing = moe.apply(weights["moe"], normalized(x), model.moe, bias=bias, mlp=mlp)
        return x + y, (routing.sizes, cache)

    x = params["embedding"][tokens] + position
    layers = (params["layers"], bias, cache)
    x, (sizes, cache) = (unrolled if isinstance(layers[0], list) else jax.lax.scan)(layer, x, layers)
    return normalized(x) @ params["embedding"].T, sizes, cache


def unrolled(layer: Callable[..., Any], x: jax.Array, layers: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    """As `lax.scan`, for a list of layers; a scan copies each layer out of the stack, in each step of decoding."""
    found = []
    for each in zip(*layers, strict=True):
        x, out = layer(x, each)
        found.append(out)
    return x, tuple(map(jnp.stack, zip(*found, strict=True)))


def loss(
    model: Model, params: Params, bias: jax.Array, text: jax.Array, mlp: Mlp = moe_mlp
) -> tuple[jax.Array, jax.Array]:
    """The mean cross entropy of each next character of texts [b, length + 1], in nats; and the rows of experts."""
    logits, sizes, _ = forward(model, params, bias, text[:, :-1], empty_cache(model, text.shape[0]), mlp=mlp)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
    return -jnp.mean(chosen), sizes


def loss_over(mesh: Mesh, model: Model) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The same loss of params, bias and text, with texts and experts sharded over a mesh."""

    def mlp(*args: Any, **options: Any) -> jax.Array:
        return parallel.expert_parallel(*args, axis=AXIS, ordered=True, **options)[0]

    def local(params: Params, bias: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(
            lambda p, spec: p if AXIS in spec else parallel.ordered_pvary(p, AXIS), params, specs_of(params)
        )
        value, sizes = loss(model, params, bias, text, mlp)
        return parallel.ordered_psum(value, AXIS) / mesh.size, jax.lax.psum(sizes, AXIS)

    def whole(params: Params, bias: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        specs = (specs_of(params), P(), P(AXIS))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(params, bias, text)

    return whole


def specs_of(params: Params) -> Params:
    """How parameters are sharded: those of experts, [layers, experts, ...], by expert, and others not at all."""

    def spec(at: Any, _: Any) -> P:
        return P(None, AXIS) if at[-1].key in ("w_gate", "w_up", "w_down") else P()

    return jax.tree_util.tree_map_with_path(spec, params)


@functools.partial(jax.jit, static_argnums=(0, 2))
def generate(
    model: Model, params: Params, count: int, bias: jax.Array, prompt: jax.Array, key: jax.Array, heat: float = 0.7
) -> jax.Array:
    """Continue prompts [b, s] by `count` characters each, one at a time, drawn from the model: [b, count]."""
    logits, _, cache = forward(model, params, bias, prompt, empty_cache(model, prompt.shape[0]))

    def step(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = carry
        token = jax.random.categorical(jax.random.fold_in(key, at), logits / heat)
        logits, _, cache = forward(model, params, bias, token[:, None], cache, at)
        return (logits[:, -1], cache), token

    positions = prompt.shape[1] + jnp.arange(count)
    return jax.lax.scan(step, (logits[:, -1], cache), positions)[1].T


# ---------------------------------------------------------------------------------------------------------------------
# Training


def start(key: jax.Array, model: Model, mesh: Mesh | None) -> State:
    """Random parameters and zeros, on one device or sharded over a mesh."""

    def made(key: jax.Array) -> State:
        params = init(key, model)
        first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return State(params, jnp.zeros((model.layers, model.experts)), first, second, jnp.zeros((), jnp.int32))

    if mesh is None:
        return made(key)
    specs = specs_of(jax.eval_shape(made, key).params)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), State(specs, P(), specs, specs, P()))
    return jax.jit(made, out_shardings=shardings)(key)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def train_step(
    model: Model, steps: int, mesh: Mesh | None, state: State, text: jax.Array
) -> tuple[State, jax.Array, jax.Array]:
    """One step of Adam, and of the bias: the new state, the loss, and the rows of each expert [layers, experts]."""
    function = functools.partial(loss, model) if mesh is None else loss_over(mesh, model)
    (value, sizes), grads = jax.value_and_grad(function, has_aux=True)(state.params, state.bias, text)
    step = state.step + 1
    rate = RATE * jnp.minimum(step / WARM_UP, 0.55 + 0.45 * jnp.cos(jnp.pi * step / steps))
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, grads)
    second = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g**2, state.second, grads)
    params = jax.tree.map(
        lambda p, m, v: p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.98**step)) + 1e-8),
        state.params, first, second,
    )  # fmt: skip
    bias = jax.vmap(functools.partial(moe.update_bias, rate=BALANCE))(state.bias, sizes)
    return State(params, bias, first, second, step), value, sizes


def corpus() -> tuple[np.ndarray, str]:
    """The pages of the documentation as one array of numbers, and the character that each number means."""
    text = "\n".join(path.read_text() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]))
    frequent = sorted({c for c in set(text) if text.count(c) >= 20} | {"?"})
    number = {c: i for i, c in enumerate(frequent)}
    return np.array([number.get(c, number["?"]) for c in text], np.int32), "".join(frequent)


def pieces(
    text: np.ndarray, model: Model, batch: int, rng: np.random.Generator, mesh: Mesh | None
) -> np.ndarray | jax.Array:
    """Random pieces of the text: [batch, length + 1]; a process makes those of its own devices."""
    starts = rng.integers(0, len(text) - model.length, batch)
    found = np.stack([text[at : at + model.length + 1] for at in starts])
    if mesh is None:
        return found
    return jax.make_array_from_callback(found.shape, NamedSharding(mesh, P(AXIS)), lambda at: found[at])


def train(
    model: Model, text: np.ndarray, steps: int, batch: int, mesh: Mesh | None = None
) -> tuple[State, list[float], list[np.ndarray]]:
    """Train from random parameters: the final state, and the losses and loads of all steps."""
    state, rng = start(jax.random.key(0), model, mesh), np.random.default_rng(0)
    losses, loads, began = [], [], time.perf_counter()
    for step in range(steps):
        state, value, sizes = train_step(model, steps, mesh, state, pieces(text, model, batch, rng, mesh))
        losses.append(float(value))
        loads.append(np.asarray(sizes))
        progress(step + 1, steps, losses[-1], began)
    return state, losses, loads


def progress(done: int, steps: int, value: float, began: float) -> None:
    """Show the progress on a terminal; in a log, a line for each tenth."""
    spent = time.perf_counter() - began
    left = spent * (steps - done) / done
    line = (
        f"[{'#' * (30 * done // steps):.<30}] step {done}/{steps}, loss {value:.3f}, {spent:.0f} s, {left:.0f} s left"
    )
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if done == steps else "", file=sys.stderr, flush=True)
    elif done == steps or done % max(steps // 10, 1) == 0:
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown, and what is kept


def bars(values: np.ndarray, top: float) -> str:
    """A character for each value, whose height is its share of `top`."""
    return "".join(BARS[min(8, max(0, round(8 * float(v) / top)))] if top else BARS[0] for v in values)


def show(losses: list[float], loads: list[np.ndarray]) -> None:
    """Print the loss over time, and how many rows each expert of each layer had at the first and at the last steps."""
    means = np.array([part.mean() for part in np.array_split(np.array(losses), min(60, len(losses)))])
    print(
        f"loss  {bars(means - 0.9 * means.min(), np.ptp(means))}  {losses[0]:.2f} -> {losses[-1]:.2f} nats a character"
    )
    last = max(len(loads) // 10, 1)
    for name, some in (("first", loads[:last]), ("last", loads[-last:])):
        print(f"rows of each expert, {name} {last} steps (half the height is an even load; busiest over mean)")
        for i, rows in enumerate(np.mean(some, axis=0)):
            print(f"  layer {i}  {bars(rows, 2 * rows.mean())}  {rows.max() / rows.mean():.2f}")


def save_picture(path: pathlib.Path, losses: list[float], loads: list[np.ndarray]) -> bool:
    """Save loss and loads over time as an SVG; False if there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 2 + 1.5 * len(loads[0])), layout="constrained")
    axes = figure.subplots(1 + len(loads[0]), sharex=True)
    axes[0].plot(losses)
    axes[0].set_ylabel("loss, nats")
    for i, each in enumerate(axes[1:]):
        each.imshow(np.stack(loads)[:, i].T, aspect="auto", interpolation="nearest", vmin=0)
        each.set_ylabel(f"experts, layer {i}")
    axes[-1].set_xlabel("step")
    figure.savefig(path)
    return True


def save(path: pathlib.Path, model: Model, characters: str, params: Params, bias: jax.Array) -> None:
    """Write a model to a file of numpy's."""
    named = {jax.tree_util.keystr(at): np.asarray(p) for at, p in jax.tree_util.tree_leaves_with_path(params)}
    np.savez(path, model=json.dumps(dataclasses.asdict(model)), characters=characters, bias=bias, **named)


def load(path: pathlib.Path) -> tuple[Model, str, Params, jax.Array]:
    """Read a model that `save` wrote."""
    with np.load(path) as file:
        model = Model(**json.loads(str(file["model"])))
        shapes = jax.eval_shape(lambda: init(jax.random.key(0), model))
        params = jax.tree_util.tree_map_with_path(lambda at, _: jnp.asarray(file[jax.tree_util.keystr(at)]), shapes)
        return model, str(file["characters"]), params, jnp.asarray(file["bias"])


def mesh_over(devices: int, coordinator: str | None, processes: int, process: int) -> Mesh:
    """A mesh of so many devices, virtual ones on a CPU, in this process or in several that find each other."""
    with contextlib.suppress(RuntimeError):  # there are devices already
        jax.config.update("jax_num_cpu_devices", devices // processes)
    if coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=30)
    axis_types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), (AXIS,), axis_types=axis_types, devices=jax.devices()[:devices])


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"want at least 1; got {number}")
    return number


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train as the command line says; return the losses of all steps."""
    ask = argparse.ArgumentParser(description="Train a small Mixture-of-Experts language model.")
    ask.add_argument("--steps", type=positive, help="default: 1000, or 20 with --quick")
    ask.add_argument("--quick", action="store_true", help="a tiny model: that it runs and learns, not how well")
    ask.add_argument("--save", type=pathlib.Path, help="write the model to this file, for serve_moe.py")
    ask.add_argument("--svg", type=pathlib.Path, default=pathlib.Path("train_moe.svg"), help="default: %(default)s")
    ask.add_argument("--experts-over", type=positive, help="shard texts and experts over this many devices")
    ask.add_argument("--coordinator", help="host:port of the first of several processes")
    ask.add_argument("--processes", type=int, default=1, help="their number")
    ask.add_argument("--process", type=int, default=0, help="the number of this one")
    asked = ask.parse_args(argv)
    if asked.experts_over and (16 % asked.experts_over or Model(vocabulary=1).experts % asked.experts_over):
        ask.error(f"--experts-over: want a divisor of the texts and of the experts; got {asked.experts_over}")
    mesh = asked.experts_over and mesh_over(asked.experts_over, asked.coordinator, asked.processes, asked.process)
    text, characters = corpus()
    model, batch = Model(vocabulary=len(characters)), 16
    if asked.quick:
        model, batch = dataclasses.replace(model, layers=2, length=32, d=32, f=32, experts=4), 8
    steps = asked.steps or (20 if asked.quick else 1000)
    print(f"{len(text)} characters, {len(characters)} different ones; {model}")
    state, losses, loads = train(model, text, steps, batch, mesh)
    show(losses, loads)
    assert len(losses) == 1 or losses[-1] < losses[0], "the loss did not fall"
    if asked.processes > 1:  # no process has all parameters
        return losses
    state = jax.device_get(state)
    prompt = np.array([[characters.index(c) for c in "A grouped "]], np.int32)
    more = generate(model, state.params, model.length - prompt.shape[1], state.bias, prompt, jax.random.key(1))
    print("a sample: A grouped", "".join(characters[i] for i in np.asarray(more[0])))
    drawn = save_picture(asked.svg, losses, loads)
    print(f"the picture: {asked.svg}" if drawn else "no picture: matplotlib is not installed")
    if asked.save:
        save(asked.save, model, characters, state.params, state.bias)
        print(f"the model: {asked.save}")
    return losses


if __name__ == "__main__":
    losses = main()
    print("losses to the bit:", *(each.hex() for each in losses[:4]))
