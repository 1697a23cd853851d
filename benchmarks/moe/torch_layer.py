"""The layer in torch with `grouped_mm` and torch.compile, in a process of its own; some tokens are checked in float64.

The composition is that of `layers.composition`: gate and up are one array, tokens are sorted and gathered by index.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import processes, torch_peer
from benchmarks.moe.shapes import FORWARD, SHAPES, MoeShape
from benchmarks.report import Record
from benchmarks.timing import reason_of, stats

NAME = "torch"
LIMIT = torch_peer.LIMIT * math.sqrt(6)  # as `exact.limit`: there are several roundings
TOKENS = 8  # that are compared with float64
COMPILE_THREADS = "4"  # of each process: several compile at a time

Tensors = Mapping[str, Any]


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yield the record of each pass as JSON, and what is printed meanwhile."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILE_THREADS)
    import torch

    shape, began = SHAPES[name], time.monotonic()
    base = Record(problem=name, dtype=shape.label, contender=NAME, limit=LIMIT)
    calls: dict[str, Callable[[], Any]] = {}
    judged: dict[str, Record] = {}
    with processes.together():
        tensors = operands(torch, shape)
        for which, call in passes(torch, shape, tensors).items():
            record = dataclasses.replace(base, which=which)
            try:
                judged[which] = record = judge(record, error(torch, shape, tensors, call()))
            except Exception as failure:  # the other pass is worth measuring
                judged[which] = record = dataclasses.replace(record, why=reason_of(failure))
            if not record.why:
                calls[which] = call
        torch.cuda.empty_cache()  # others are timed before
    yield {processes.SAYS: f"{name}: torch compiled in {time.monotonic() - began:.0f} s"}
    with processes.alone():
        for which, record in judged.items():
            if which in calls:
                record = dataclasses.replace(record, time=stats(torch_peer.burst(torch, calls[which])))
            yield record.to_json()


def judge(record: Record, off: float) -> Record:
    """The record with its error, and why it is not timed if that is too large."""
    return dataclasses.replace(record, error=off, why="" if off <= LIMIT else f"wrong: relative error {off:.1e}")


def operands(torch: Any, shape: MoeShape, device: str = "cuda") -> dict[str, Any]:
    """Normal data as in `layers.operands`; what a step is differentiated in requires a gradient."""
    torch.manual_seed(shape.seed)
    t, d, f, e = shape.t, shape.d, shape.f, shape.e
    sizes = {"x": (t, d), "router": (d, e), "gate_up": (e, d, 2 * f), "down": (e, f, d)}
    sizes |= {"bias_gate_up": (e, 2 * f), "bias_down": (e, d)} if shape.biases else {}
    scales = {"router": d**-0.5, "gate_up": d**-0.5, "down": f**-0.5}
    made = {
        name: (torch.randn(size, dtype=torch.bfloat16, device=device) * scales.get(name, 1.0)).requires_grad_()
        for name, size in sizes.items()
    }
    return made | {"ct": torch.randn((t, d), dtype=torch.bfloat16, device=device)}


def passes(torch: Any, shape: MoeShape, tensors: Tensors) -> dict[str, Callable[[], Any]]:
    """The compiled passes: each returns the result, the experts and, of a step, the gradients."""
    compiled = torch.compile(lambda given: layer(torch, shape, given), dynamic=False, fullgraph=True)
    given = {name: tensor for name, tensor in tensors.items() if name != "ct"}

    def forward() -> Any:
        with torch.no_grad():
            return compiled(given)

    def step() -> Any:
        out, experts = compiled(given)
        return out, experts, torch.autograd.grad(out, list(given.values()), tensors["ct"])

    both = {FORWARD: forward, "step": step}
    return {which: both[which] for which in shape.passes}


def layer(torch: Any, shape: MoeShape, given: Tensors) -> tuple[Any, Any]:
    """The result [t, d] and the experts [t, k]."""
    x, t, k = given["x"], shape.t, shape.k
    multiply = torch_peer.grouped_mm(torch)
    scores = torch.softmax((x @ given["router"]).float(), dim=-1)
    weights, experts = torch.topk(scores, k)
    weights = weights / weights.sum(-1, keepdim=True)
    ids, order = torch.sort(experts.flatten())
    ends = torch.searchsorted(ids, torch.arange(shape.e, device=x.device), right=True).int()
    z = multiply(x[order // k], given["gate_up"], offs=ends)
    if shape.biases:
        z = z + given["bias_gate_up"][ids]
    gate, up = z.chunk(2, dim=-1)
    y = multiply(swiglu(torch, shape, gate, up), given["down"], offs=ends)
    if shape.biases:
        y = y + given["bias_down"][ids]
    y = y[torch.argsort(order)].view(t, k, shape.d)
    return (y * weights[:, :, None]).sum(1).to(x.dtype), experts


def swiglu(torch: Any, shape: MoeShape, gate: Any, up: Any) -> Any:
    """The activation of the layer, as `moe.swiglu`."""
    limit, alpha, shift = shape.swiglu
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + shift)


def error(torch: Any, shape: MoeShape, tensors: Tensors, results: Any) -> float:
    """The largest relative error of the result and of the gradient in x, at some tokens."""
    out, experts, *gradients = results
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    chosen = torch.linspace(0, shape.t - 1, min(TOKENS, shape.t)).long().tolist()
    worst = 0.0
    for t in chosen:
        x = tensors["x"][t].detach().double().requires_grad_()
        right = _token(torch, shape, tensors, x, experts[t].tolist())
        pairs = [(out[t].detach(), right.detach())]
        if gradients:
            (d_x,) = torch.autograd.grad(right, x, tensors["ct"][t].double())
            pairs.append((gradients[0][0][t], d_x))
        worst = max(worst, *(float((a.double() - b).norm() / b.norm()) for a, b in pairs))
    return worst


def _token(torch: Any, shape: MoeShape, tensors: Tensors, x: Any, experts: list[int]) -> Any:
    """The layer on one token in float64, with the experts that were chosen for it."""
    wide = {name: tensor.detach() for name, tensor in tensors.items()}
    weights = torch.softmax((x @ wide["router"].double())[experts], dim=-1)
    out = 0.0
    for weight, e in zip(weights, experts, strict=True):
        z = x @ wide["gate_up"][e].double()
        z = z + wide["bias_gate_up"][e].double() if shape.biases else z
        y = swiglu(torch, shape, *z.chunk(2)) @ wide["down"][e].double()
        y = y + wide["bias_down"][e].double() if shape.biases else y
        out = out + weight * y
    return out
