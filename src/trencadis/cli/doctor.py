"""The command `doctor`: versions, devices, what each device would use, and a check of one small result."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import textwrap

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.api.matmul import grouped_matmul
from trencadis.core.target import Target
from trencadis.why import why

NEEDED = ("jax", "jaxlib", "numpy", "jaxtyping")
OPTIONAL = (
    "trencadis-cpu",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-rocm7-plugin",
    "qwix",
    "typer",
    "rich",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The findings of `diagnose`, which print as text."""

    versions: dict[str, str]
    x64: bool
    huge_pages: str | None  # None where the platform has no such setting
    devices: tuple[str, ...]
    plans: tuple[str, ...]
    error: str | None  # of the self-check

    @property
    def ok(self) -> bool:
        """Whether the self-check found no error."""
        return self.error is None

    def __str__(self) -> str:
        sections = {
            "versions": [f"{name:<18} {version}" for name, version in self.versions.items()],
            "devices": list(self.devices),
            "plans": list(self.plans),
            "settings": [
                f"{'x64':<18} {'on' if self.x64 else 'off'}",
                *([] if self.huge_pages is None else [f"{'huge pages':<18} {self.huge_pages}"]),
            ],
            "self-check": [
                "ok: forward and backward agree with numpy" if self.error is None else f"error: {self.error}"
            ],
        }
        return "\n".join(f"{name}\n{textwrap.indent(chr(10).join(lines), '  ')}" for name, lines in sections.items())

    __repr__ = __str__


def diagnose() -> Report:
    """Report on this installation and its devices, with a self-check.

    >>> diagnose().ok
    True
    """
    targets: dict[Target, int] = {}
    try:
        for device in jax.local_devices():
            target = Target.of(device)
            targets[target] = targets.get(target, 0) + 1
        self_check()
        error = None
    except Exception as failure:  # whatever goes wrong is what the report is for
        asked = "" if targets else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} has no devices: "
        error = f"{asked}{type(failure).__name__}: {' '.join(str(failure).split())}"
    return Report(
        versions=_versions(),
        x64=jnp.result_type(float) == jnp.float64,
        huge_pages=_huge_pages(os.environ.get("GLIBC_TUNABLES", "")) if platform.libc_ver()[0] == "glibc" else None,
        devices=tuple(f"{count} x {target}" for target, count in targets.items()),
        plans=tuple(line for target in targets for line in _plans(target)),
        error=error,
    )


def self_check() -> None:
    """Check a grouped matmul of 8 rows, one of them unowned, and its gradients against numpy; raise if they differ.

    >>> self_check()
    """
    sizes = jnp.array([3, 0, 4])
    x = np.sin(np.arange(40, dtype=np.float32)).reshape(8, 5)
    w = np.cos(np.arange(90, dtype=np.float32)).reshape(3, 5, 6)
    ct = np.sin(np.arange(48, dtype=np.float32) + 1).reshape(8, 6)
    out, pullback = jax.vjp(
        lambda x, w: grouped_matmul(x, w, sizes, precision="highest"), jnp.asarray(x), jnp.asarray(w)
    )
    dx, dw = pullback(jnp.asarray(ct))
    want = {"out": np.zeros_like(ct), "d lhs": np.zeros_like(x), "d rhs": np.zeros_like(w)}
    for group, (start, end) in enumerate([(0, 3), (3, 3), (3, 7)]):
        want["out"][start:end] = x[start:end] @ w[group]
        want["d lhs"][start:end] = ct[start:end] @ w[group].T
        want["d rhs"][group] = x[start:end].T @ ct[start:end]
    for (name, expected), got in zip(want.items(), (out, dx, dw), strict=True):
        gap = float(np.max(np.abs(np.asarray(got) - expected)))
        if not gap <= 1e-4:  # also true for NaN
            raise AssertionError(f"{name} differs from numpy by {gap:.3g}")


def _huge_pages(tunables: str) -> str:
    """Whether large CPU results are allocated in huge pages; in small ones a weight gradient is mostly page faults.

    >>> _huge_pages("glibc.malloc.hugetlb=1")
    'on'
    """
    if "glibc.malloc.hugetlb=" in tunables and "glibc.malloc.hugetlb=0" not in tunables:
        return "on"
    return "off; GLIBC_TUNABLES=glibc.malloc.hugetlb=1 makes large results on CPU cheaper"


def _versions() -> dict[str, str]:
    from trencadis import __version__  # not above: the package may import this module before it has a version

    versions = {"python": platform.python_version(), "trencadis": __version__}
    for name in (*NEEDED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in NEEDED:
                versions[name] = "not found"
    return versions


def _plans(target: Target) -> list[str]:
    """Lines on the plans of a typical layer of experts on a target, in both forms."""
    x, y, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2048), (8192, 1024), (32, 2048, 1024)))
    sizes = jax.ShapeDtypeStruct((32,), jnp.int32)
    answers = [
        why(x, w, sizes, jnp.bfloat16, target=target),
        why(x, y, sizes, jnp.bfloat16, transpose_lhs=True, target=target),
    ]
    lines = [f"{target}, for m=8192 k=2048 n=1024 g=32 in bfloat16:"]
    for answer in answers:
        lines.append(f"  {answer.problem.form.value:<12} {answer.passes[0].plan}")
        lines += [f"  {'':<12} not {name}: {each.reason}" for name, each in answer.passes[0].refusals.items()]
    return lines
