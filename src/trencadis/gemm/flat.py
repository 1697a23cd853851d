"""The arrays of a grouped GEMM as flat buffers, as the TPU kernels take them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from trencadis.gemm.problem import Buffer, GemmProblem, Groups

Array = jax.Array


def flat_buffer(buffer: Buffer) -> Buffer:
    """The same matrices, with groups that follow one another along rows: an array [k, m] of ragged m is transposed."""
    if buffer.group_axis == 0:
        return buffer
    return dataclasses.replace(buffer, shape=buffer.shape[::-1], transposed=not buffer.transposed)


def flattened(problem: GemmProblem) -> GemmProblem:
    """The problem of flat buffers, whose result is not transposed: that of a transposed one is computed instead."""
    lhs, rhs, out = (flat_buffer(buffer) for buffer in (problem.lhs, problem.rhs, problem.out))
    if not out.transposed:
        return problem.replace(lhs=lhs, rhs=rhs, out=out, known=None)
    return problem.replace(
        m=problem.n, n=problem.m, lhs=rhs.flip(), rhs=lhs.flip(), out=out.flip(), known=None
    )  # fmt: skip


class FlatOperands(NamedTuple):
    """The operands of the problem of flat buffers."""

    lhs: Array
    rhs: Array
    groups: Groups
    extras: dict[str, Array]  # by the names of `Extras`, those that there are


def flat_operands(problem: GemmProblem, lhs: Array, rhs: Array, *rest: Array) -> FlatOperands:
    """The operands of `flattened(problem)`, from those of a problem."""
    groups, extras = Groups(*rest[:6]), problem.extras(rest[6:])
    pair = _flat(problem.lhs, lhs), _flat(problem.rhs, rhs)
    if flat_buffer(problem.out).transposed:
        pair = pair[::-1]
        groups = Groups(groups.rhs, groups.lhs, groups.out, groups.n, groups.k, groups.m)
    given = {name: each for name, each in extras._asdict().items() if each is not None}
    if problem.accumulate:
        given["existing"] = _flat(problem.out, given["existing"])
    return FlatOperands(*pair, groups, given)


def _flat(buffer: Buffer, x: Array) -> Array:
    return (x if buffer.group_axis == 0 else x.T).reshape(-1)


def shaped(problem: GemmProblem, out: Array) -> Array:
    """The result of a problem, from that of the problem of flat buffers."""
    shape = problem.out.shape
    return out.reshape(shape) if problem.out.group_axis == 0 else out.reshape(shape[::-1]).T
