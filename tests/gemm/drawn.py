"""Problems of the general form whose m, k and n are all ragged, with random operands and their meaning in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.target import Target
from trencadis.gemm import tpu
from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups


def flat(matrices, room, dtype, transposed=False):
    """The matrices one after the other, and NaN after the last, in a buffer of `room` entries."""
    entries = np.concatenate([(x.T if transposed else x).ravel() for x in matrices])
    return np.pad(entries, (0, room - entries.size), constant_values=np.nan).astype(dtype)


def starts(rows, columns):
    entries = np.multiply(rows, columns)
    return (np.cumsum(entries) - entries).astype(np.int32)


def drawn(rng, sizes, rooms, dtype, transposes, **epilogue):
    """A problem, its operands, and its meaning; of the largest result beta is 0, and the existing values are NaN."""
    (m, k, n), dtype = sizes, jnp.dtype(dtype)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    lefts, rights = [draw(*s) for s in zip(m, k, strict=True)], [draw(*s) for s in zip(k, n, strict=True)]
    dim, names = Dim(size=max(rooms), ragged=True), ("lhs", "rhs", "out")
    buffers = {
        name: Buffer(shape=(room,), dtype=np.dtype(dtype), ragged=(True, True), transposed=transposed)
        for name, room, transposed in zip(names, rooms, transposes, strict=True)
    }
    wide = np.dtype(np.float32) if epilogue.get("alpha") else None
    problem = GemmProblem(groups=len(m), m=dim, k=dim, n=dim, wide=wide, **buffers, **epilogue)
    groups = Groups(starts(m, k), starts(k, n), starts(m, n), *(np.asarray(x, np.int32) for x in sizes))
    parts = [slice(start, start + size) for start, size in zip(groups.out, np.multiply(m, n), strict=True)]
    largest = int(np.argmax(np.multiply(m, n)))
    existing, alpha = draw(rooms[2]), draw(len(m)).astype(np.float32)
    beta = np.arange(1, len(m) + 1, dtype=np.float32)
    if problem.beta:
        existing[parts[largest]], beta[largest] = np.nan, 0
    given = [x for x, on in ((existing, problem.accumulate), (alpha, problem.alpha), (beta, problem.beta)) if on]
    want = existing.astype(np.float64) if problem.accumulate else np.zeros(rooms[2])
    for i, (x, y) in enumerate(zip(lefts, rights, strict=True)):
        product = x.astype(np.float64) @ y.astype(np.float64) * (alpha[i] if problem.alpha else 1)
        kept = (want[parts[i]] * beta[i] if beta[i] else 0) if problem.beta else want[parts[i]]
        want[parts[i]] = (product.T if transposes[2] else product).ravel() + kept
    operands = [flat(lefts, rooms[0], dtype, transposes[0]), flat(rights, rooms[1], dtype, transposes[1])]
    return problem, [*operands, *groups, *given], want


def flat_problem(sizes, dtype="bfloat16", **changes):
    """A problem whose m, k and n are all ragged, with room for square matrices of these sizes."""
    room = sum(size * size for size in sizes)
    dim, one = Dim(size=room, ragged=True), Buffer(shape=(room,), dtype=jnp.dtype(dtype), ragged=(True, True))
    return GemmProblem(groups=len(sizes), m=dim, k=dim, n=dim, lhs=one, rhs=one, out=one, **changes)


def whole_strides(monkeypatch, state):
    """Let the detector of races, which knows no slice with a stride, take it for all that it spans."""
    plain = state._slices_overlap
    whole = lambda x: slice(x.start, x.stop) if isinstance(x, slice) and x.step else x
    monkeypatch.setattr(state, "_slices_overlap", lambda a, b: plain(whole(a), whole(b)))


KINDS = [
    ("bfloat16", (False, False, False), {"accumulate": True, "alpha": True, "beta": True}),
    ("float32", (True, True, True), {}),
    ("bfloat16", (True, False, False), {}),
    ("bfloat16", (False, True, False), {"accumulate": True}),
    ("float32", (False, False, True), {"accumulate": True}),
]


def check_values(problem, execute, operands, want, dtype, transposes):
    """A kernel leaves the last group, whose rows are too long, to XLA's loops, and all values are right."""

    def call(*operands):
        out, left = execute(*operands)
        loops = functools.partial(tpu.loops, Target(platform="cpu"))
        return tpu.with_others(problem, loops, out, left, *operands), left

    out, left = jax.jit(call)(*operands)
    assert left.tolist() == [False, False, False, False, not all(transposes[1:])]  # n of the last group is a row
    out, exact = np.asarray(out, np.float64), 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(out, want, rtol=exact, atol=40 * exact)
