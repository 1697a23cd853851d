"""Pods in figures: the links of a torus, and what a step of an expert-parallel layer takes at best."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from trencadis.core.devices import Chip, chip_of
from trencadis.parallel.choice import Strategy, bytes_moved

# Bytes per second out of a chip over all of its links, one way: half of the bidirectional figures of the Cloud TPU
# pages. A chip of v4 and v7x is two devices.
LINKS = {"v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 400e9, "v7x": 600e9}
DEVICES = {"v4": 2, "v7x": 2}
TORUS = {"v5e": 16, "v6e": 16}  # the length of an axis from which on it is closed to a ring; elsewhere 4


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """Chips in a mesh or torus of two or three dimensions."""

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def named(cls, topology: str) -> Pod:
        """The pod that the compiler knows by a name.

        >>> Pod.named("v6e:8x8").devices
        64
        """
        name, _, shape = topology.partition(":")
        return cls(chip_of("v7x" if name == "tpu7x" else name), tuple(map(int, shape.split("x"))))

    @property
    def devices(self) -> int:
        """The number of JAX's devices."""
        return math.prod(self.shape) * DEVICES.get(self.chip.name, 1)

    @property
    def bandwidth(self) -> float:
        """Bytes per second into a device, over all links of its chip."""
        return LINKS[self.chip.name] / DEVICES.get(self.chip.name, 1)

    @property
    def closed(self) -> bool:
        """Whether the longest axis is a ring; otherwise its ends have no link to each other."""
        return max(self.shape) >= TORUS.get(self.chip.name, 4)

    @property
    def bisection(self) -> float:
        """Bytes per second, one way, from one half of the chips to the other, cut across the longest axis."""
        link = LINKS[self.chip.name] / (2 * len(self.shape))
        return (2 if self.closed else 1) * link * math.prod(self.shape) / max(self.shape)

    def gather(self, received: float) -> float:
        """Seconds in which every device gets so many bytes by gathers or reduce-scatters, along rings or open lines.

        At the end of an open line half of the links are missing.
        """
        return received / self.bandwidth * (1 if self.closed else 2)

    def exchange(self, received: float) -> float:
        """Seconds in which every device gets so many bytes, as many from each other device.

        Half of them come from the other half of the pod, so that the bisection is the limit of a large one.

        >>> pod = Pod.named("v6e:8x8")
        >>> round(pod.exchange(1e9) / (1e9 / pod.bandwidth), 1)
        8.0
        """
        return max(received / self.bandwidth, self.devices / 2 * received / 2 / self.bisection)


class Times(NamedTuple):
    """What a step, forward and backward, takes at best, in seconds; and the bytes that a device gets from others."""

    products: float
    communication: float
    bytes: int


def step_times(
    pod: Pod, strategy: Strategy, *, tokens: int, k: int, d: int, f: int, local: int, capacity: int | None = None
) -> Times:
    """The times of a layer with an even load in bfloat16: products at the peak rate, communication by the links.

    >>> times = step_times(Pod.named("v6e:8x8"), "ragged", tokens=4096, k=8, d=2048, f=768, local=2)
    >>> f"{1e3 * times.products:.1f} ms of products, {1e3 * times.communication:.1f} ms of communication"
    '1.0 ms of products, 10.6 ms of communication'
    """
    sizes = dict(shards=pod.devices, tokens=tokens, k=k, local=local)
    passes = (bytes_moved(strategy, row=2 * d, capacity=capacity, backward=back, **sizes) for back in (False, True))
    moved = sum(passes)
    flops = 18 * tokens * k * d * f  # three products, each with two gradients
    spent = pod.gather(moved) if strategy == "all_gather" else pod.exchange(moved)
    return Times(flops / (pod.chip.peak_bf16 * pod.chip.cores), spent, moved)
