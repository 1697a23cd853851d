"""From a caller's arguments to a problem: every check of what was passed, and every message.

A function that checks an argument raises an error that names the argument, what came and what is wanted.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from trencadis.core.dtypes import ShapeDtype
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Form, Problem, Shape


def rows_problem(
    lhs: ShapeDtype, rhs: ShapeDtype, group_sizes: ShapeDtype, out: object,
    *, transpose_rhs: bool, epilogue: Epilogue, precision: object,
) -> Problem:  # fmt: skip
    """The problem `grouped_matmul` asks, or an error."""
    _rank("lhs", lhs, 2, "[m, k]")
    _rank("rhs", rhs, 3, "[g, n, k]" if transpose_rhs else "[g, k, n]")
    _numeric(lhs=lhs, rhs=rhs)
    blocks, groups = _blocks_and_groups(group_sizes, lhs.shape[0])
    (m, k), (local, rhs_k, n) = lhs.shape, rhs.shape
    if transpose_rhs:
        rhs_k, n = n, rhs_k
    if k != rhs_k:
        where, stored = ("last", "[g, k, n]") if transpose_rhs else ("second", "[g, n, k]")
        other = f"; rhs of shape {stored} wants transpose_rhs={not transpose_rhs}" if k == n else ""
        raise ValueError(
            f"rhs: the {where} dimension must be k = {k}, the last dimension of lhs {lhs.shape}; "
            f"got rhs of shape {rhs.shape} with transpose_rhs={transpose_rhs}{other}"
        )
    if local > groups:
        raise ValueError(
            f"rhs: holds {local} groups but group_sizes names only {groups}; "
            "want as many as group_sizes, or a window of fewer with group_offset"
        )
    return Problem(
        form=Form.ROWS, m=m // blocks, k=k, n=n, groups=groups, local_groups=local, batch=blocks,
        lhs=np.dtype(lhs.dtype), rhs=np.dtype(rhs.dtype), out=result_dtype(out, lhs, rhs),
        transpose_rhs=bool(transpose_rhs), epilogue=epilogue, precision=checked_precision(precision),
    )  # fmt: skip


def contraction_problem(
    lhs: ShapeDtype, rhs: ShapeDtype, group_sizes: ShapeDtype, out: object,
    *, transpose_lhs: bool, local: int, precision: object,
) -> Problem:  # fmt: skip
    """The problem `transposed_grouped_matmul` asks, or an error; `transpose_lhs` means that lhs is stored [k, m]."""
    _rank("lhs", lhs, 2, "[k, m]" if transpose_lhs else "[m, k]")
    _rank("rhs", rhs, 2, "[m, n]")
    _numeric(lhs=lhs, rhs=rhs)
    blocks, groups = _blocks_and_groups(group_sizes, rhs.shape[0])
    k, lhs_m = lhs.shape if transpose_lhs else lhs.shape[::-1]
    m, n = rhs.shape
    if lhs_m != m:
        where = "last" if transpose_lhs else "first"
        other = f"; lhs of shape [m, k] wants transpose_lhs={transpose_lhs}" if k == m else ""
        raise ValueError(
            f"lhs: the {where} dimension must be m = {m}, the first dimension of rhs {rhs.shape}; "
            f"got {lhs.shape}{other}"
        )
    return Problem(
        form=Form.CONTRACTION, m=m // blocks, k=k, n=n, groups=groups, local_groups=local, batch=blocks,
        summed=blocks > 1,
        lhs=np.dtype(lhs.dtype), rhs=np.dtype(rhs.dtype), out=result_dtype(out, lhs, rhs),
        transpose_lhs=transpose_lhs, precision=checked_precision(precision),
    )  # fmt: skip


def problem_of(
    lhs: Shape, rhs: Shape, *, groups: int | None = None, dtype: DTypeLike = jnp.float32, **options: Any
) -> Problem:
    """The `Problem` of `grouped_matmul` (rhs of rank 3) or `transposed_grouped_matmul` (rank 2) for these shapes.

    For asking the plan about a call without making it; options are fields of `Problem`.

    >>> print(problem_of((16, 4), (2, 4, 8), dtype=jnp.bfloat16))
    rows m=16 k=4 n=8 g=2: bfloat16 x bfloat16 -> bfloat16
    """
    rows = len(rhs) == 3
    groups = groups if groups is not None else rhs[0]
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    if rows:
        asked = rows_problem(a, b, sizes, dtype, transpose_rhs=options.pop("transpose_rhs", False),
                                  epilogue=Epilogue(), precision=None)  # fmt: skip
    else:
        asked = contraction_problem(a, b, sizes, dtype, transpose_lhs=True, local=groups, precision=None)
    return asked.replace(**options)


def check_existing_out(existing_out: object, shape: Shape, dtype: np.dtype) -> None:
    """existing_out has the shape and the dtype of the result."""
    if existing_out is None:
        return
    if not isinstance(existing_out, ShapeDtype):
        raise TypeError(f"existing_out: want an array of shape {shape}; got {type(existing_out).__name__}")
    if existing_out.shape != shape:
        raise ValueError(f"existing_out: want shape {shape}; got {existing_out.shape}")
    if existing_out.dtype != dtype:
        raise ValueError(f"existing_out: want dtype {dtype.name}, the preferred_element_type; got {existing_out.dtype}")


def check_bias(problem: Problem, bias: ShapeDtype | None) -> None:
    """Bias is one row of length n for each group of rhs."""
    if bias is None:
        return
    want = (problem.local_groups, problem.n)
    if bias.shape != want:
        raise ValueError(f"bias: want shape [g, n] = {want}; got {bias.shape}")
    _numeric(bias=bias)
    if jnp.issubdtype(bias.dtype, jnp.complexfloating) and not jnp.issubdtype(problem.out, jnp.complexfloating):
        raise TypeError(f"bias: want a real dtype for a {problem.out.name} result; got {bias.dtype}")


def check_sizes(group_sizes: object, m: int) -> None:
    """Sizes [g] or [blocks, g] known now are nonnegative and fit into m rows; traced ones are clamped at run time."""
    sizes = concrete(group_sizes)
    if sizes is None:
        return
    if sizes.ndim == 2:
        for block in sizes:
            check_sizes(block, m)
        return
    if sizes.size and sizes.min() < 0:
        i = int(np.argmin(sizes))
        raise ValueError(f"group_sizes: sizes must be >= 0; group {i} has {sizes[i]}")
    total = sum(int(s) for s in sizes)
    if total > m:
        raise ValueError(f"group_sizes: must sum to at most m = {m} rows; got a sum of {total}")


def check_schedule(
    group_sizes: ShapeDtype, m: object, tm: object, first: ArrayLike, num_nonzero_groups: object
) -> None:
    """What a schedule needs: sizes [g] that fit, a row count, a tile height, and a window inside the groups."""
    groups = _groups(group_sizes)
    if not is_int(m) or not 0 <= m < 2**31:
        raise ValueError(f"m: want a nonnegative int below 2**31, as row positions are int32; got {m!r}")
    if not is_int(tm) or tm < 1:
        raise ValueError(f"tm: want a positive int; got {tm!r}")
    check_sizes(group_sizes, m)
    check_window(first, checked_count("num_nonzero_groups", num_nonzero_groups, groups), groups, "start_group")


def checked_count(name: str, count: object, groups: int) -> int:
    """A static number of groups."""
    if not is_int(count) or not 0 <= count <= groups:
        raise ValueError(f"{name}: want an int from 0 to {groups}, the length of group_sizes; got {count!r}")
    return int(count)


def is_int(x: object) -> TypeGuard[int]:
    """Whether x is an int of Python or numpy; True and False are not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def first_group(group_offset: Any) -> jax.Array | np.int32:
    """group_offset as a scalar int32, or an error for a bad shape or dtype."""
    if group_offset is None:
        return np.int32(0)
    wanted = "an int or an integer array of shape () or (1,)"
    try:
        group_offset = np.asarray(group_offset) if isinstance(group_offset, (list, tuple)) else group_offset
        named = isinstance(group_offset, str)  # which JAX would take for the name of a dtype
        shape, dtype = np.shape(group_offset), None if named else jnp.result_type(group_offset)
    except (TypeError, ValueError, OverflowError):
        dtype = None
    if dtype is None:
        raise TypeError(f"group_offset: want {wanted}; got {group_offset!r}")
    if shape not in ((), (1,)):
        raise ValueError(f"group_offset: want {wanted}; got shape {shape}")
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"group_offset: want an integer; got dtype {dtype}")
    known = concrete(group_offset)
    if known is None:
        wide, bound = jnp.reshape(group_offset, ()), jnp.iinfo(dtype)
        if dtype != jnp.int32:  # clip, or a large unsigned offset would become negative
            wide = jnp.clip(wide, max(bound.min, -(2**31)), min(bound.max, 2**31 - 1)).astype(jnp.int32)
        return wide
    if not -(2**31) <= int(known.reshape(())) < 2**31:
        raise ValueError(f"group_offset: want the index of a group; got {known.reshape(())}")
    return np.int32(known.reshape(()))


def check_window_given(group_offset: object, local: int, groups: int) -> None:
    """A rhs of fewer groups than group_sizes names is a window, and the caller has to say where it starts."""
    if group_offset is None and local < groups:
        raise ValueError(
            f"rhs: holds {local} groups and group_sizes names {groups}; want as many, or group_offset to say which of "
            "them rhs holds"
        )


def check_window(first: ArrayLike, local: int, groups: int, name: str = "group_offset") -> None:
    """A window known now lies inside the groups."""
    known = concrete(first)
    if known is not None and not 0 <= int(known) <= groups - local:
        raise ValueError(
            f"{name}: the window [{int(known)}, {int(known) + local}) must lie inside the {groups} groups "
            f"of group_sizes; want 0 <= {name} <= {groups - local}"
        )


def local_groups(num_actual_groups: object, first: ArrayLike, groups: int) -> int:
    """How many groups a contraction computes: as told, or all that remain from the first on."""
    if num_actual_groups is not None:
        return checked_count("num_actual_groups", num_actual_groups, groups)
    known = concrete(first)
    if known is None:
        raise ValueError(
            "num_actual_groups: must be given when group_offset is traced, since the shape of the result "
            "cannot depend on a traced value"
        )
    if not 0 <= int(known) <= groups:
        raise ValueError(f"group_offset: want 0 to {groups}, the length of group_sizes; got {int(known)}")
    return groups - int(known)


def result_dtype(preferred_element_type: Any, *operands: ShapeDtype) -> np.dtype:
    """The output dtype as a numpy dtype, canonical under the x64 setting; it can hold what the operands give."""
    try:
        dtype = jnp.dtype(preferred_element_type) if preferred_element_type is not None else None
    except TypeError:
        dtype = None
    if dtype is None:
        raise TypeError(f"preferred_element_type: want a dtype; got {preferred_element_type!r}")
    if not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(f"preferred_element_type: want a number dtype; got {dtype.name}")
    if dtype == jnp.float8_e8m0fnu:  # a dtype of scales: powers of two and NaN
        raise TypeError(f"preferred_element_type: want a dtype that has 0 and negative numbers; got {dtype.name}")
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        for x in operands:
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(
                    f"preferred_element_type: want a complex dtype for {x.dtype} operands; got {dtype.name}"
                )
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def checked_precision(precision: Any) -> PrecisionLike:
    """Precision in a hashable spelling that lax understands, or an error."""
    if isinstance(precision, list):
        precision = tuple(precision)
    try:
        _accepted_by_dot(precision)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"precision: want None, a jax.lax.Precision, its name, a pair of these, or a jax.lax.DotAlgorithm; "
            f"got {precision!r}"
        ) from error
    return precision


@functools.lru_cache(maxsize=64)  # tracing a product takes longer than all other checks of a call together
def _accepted_by_dot(precision: PrecisionLike) -> None:
    """Raise what lax raises for a precision that it does not know."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(lambda a, b: lax.dot(a, b, precision=precision), one, one)


def checked_flag(name: str, value: object) -> bool:
    """A static yes or no."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: want True or False, known at trace time; got {value!r}")


def concrete(x: object) -> np.ndarray | None:
    """The value of x where it is known now, else None."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def as_array(name: str, x: object) -> jax.Array:
    """x as a JAX array, or a TypeError that names the argument."""
    if isinstance(x, jax.Array) and not jax.typeof(x).weak_type:
        return x  # jnp.asarray copies what is being differentiated, and jax_debug_nans looks at every copy
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        of = f" of dtype {x.dtype}" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"{name}: want an array; got {type(x).__name__}{of}") from None


def as_sizes(group_sizes: object, name: str = "group_sizes") -> jax.Array | np.ndarray:
    """Sizes as an array; in numpy if it is not JAX's yet, so that its values are still known inside `jit`."""
    if isinstance(group_sizes, (list, tuple)) and all(is_int(size) for size in group_sizes):
        for i, size in enumerate(group_sizes):
            if not -(2**63) <= size < 2**63:
                raise ValueError(f"{name}: want sizes that fit into 64 bits; group {i} has {size}")
        return np.asarray(group_sizes, np.int64)
    return group_sizes if isinstance(group_sizes, np.ndarray) else as_array(name, group_sizes)


def _rank(name: str, x: ShapeDtype, rank: int, axes: str) -> None:
    if x.ndim != rank:
        raise ValueError(f"{name}: want {rank} dimensions {axes}; got {x.ndim}, shape {x.shape}")
    check_static(name, x)


def check_type(name: str, x: object, kind: type, source: str) -> None:
    """Raise an error that names the argument unless it is of a type, which `source` gives: what it is the result of."""
    if not isinstance(x, kind):
        raise TypeError(f"{name}: want {source}; got {type(x).__name__}")


def as_mask(x: object) -> jax.Array:
    """A mask of booleans; numbers are refused, since a mask that is added to scores has 0 where others have True."""
    mask = as_array("mask", x)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask: want booleans, True where a token counts; got {mask.dtype}")
    return mask


def check_static(name: str, x: ShapeDtype) -> None:
    """Raise an error that names the argument if its shape has symbolic dimensions, as those of `jax.export` may be."""
    if not all(is_int(size) for size in x.shape):
        raise ValueError(f"{name}: want a shape of ints, since tiles are planned for it; got the symbolic {x.shape}")


def _numeric(**operands: ShapeDtype) -> None:
    for name, x in operands.items():
        if not jnp.issubdtype(x.dtype, jnp.number):
            raise TypeError(f"{name}: want a number dtype; got {x.dtype}")


def _blocks_and_groups(group_sizes: ShapeDtype, m: int) -> tuple[int, int]:
    """The number of blocks of rows that have sizes of their own, 1 for sizes [g], and the number of groups."""
    if group_sizes.ndim != 2:
        return 1, _groups(group_sizes)
    blocks, groups = group_sizes.shape
    if not blocks or m % blocks:
        raise ValueError(
            f"group_sizes: want 1 dimension [g], or [blocks, g] where the blocks divide m = {m}; "
            f"got shape {group_sizes.shape}"
        )
    _groups(jax.ShapeDtypeStruct((groups,), group_sizes.dtype))
    return blocks, groups


def _groups(group_sizes: ShapeDtype) -> int:
    if group_sizes.ndim != 1:
        raise ValueError(f"group_sizes: want 1 dimension [g]; got {group_sizes.ndim}, shape {group_sizes.shape}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes: want an integer dtype; got {group_sizes.dtype}")
    return int(group_sizes.shape[0])
