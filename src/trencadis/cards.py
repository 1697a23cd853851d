"""The GPUs that the kernels are written for, in figures."""

from __future__ import annotations

import dataclasses
import re

from trencadis.target import Target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU: what a kernel has to work with."""

    kind: str  # what JAX calls the device, e.g. "NVIDIA H200"
    cores: int  # streaming multiprocessors
    shared: int = 227 << 10  # bytes of shared memory that one thread block can have


CARDS: dict[str, Card] = {
    "h100": Card(kind="NVIDIA H100 80GB HBM3", cores=132),
    "h200": Card(kind="NVIDIA H200", cores=132),
}

_HOPPER = re.compile(r"\bG?H(?:100|200|800|20)\b")  # compute capability 9.0 under its trade names


def card_for(target: Target) -> Card | None:
    """The Hopper GPU a target is; None if it is another, or if it is not known which.

    >>> card_for(Target(platform="cuda", kind="NVIDIA H200", cores=132)).cores
    132
    >>> card_for(Target(platform="cuda", kind="NVIDIA A100-SXM4-40GB")) is None
    True
    """
    if target.platform != "cuda" or target.kind is None or not _HOPPER.search(target.kind):
        return None
    known = {card.kind: card for card in CARDS.values()}.get(target.kind, Card(kind=target.kind, cores=132))
    return known if target.cores is None else dataclasses.replace(known, cores=target.cores)
