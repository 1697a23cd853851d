"""A layer and its parts, compiled ahead and compared with float64: what is timed on every device."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.moe import exact, layers, parts
from benchmarks.moe.layers import Operands
from benchmarks.moe.shapes import MoeShape
from benchmarks.peers import JaxCall
from benchmarks.report import Record
from benchmarks.timing import Stats, reason_of

PRODUCTS = "products"  # the contender that is the sum of the grouped matmuls
SEQUENCE = "products in sequence"  # the same as one program
DENSE = "dense in sequence"  # dense matmuls of as many FLOPs as one program: what the GPU sustains
OTHERS = "others"  # the kind of parts that are no products
PAUSE_S = 5.0  # before a function is compiled again

Key = tuple[str, str]  # a pass and a contender, or the kind of a part and its name


class Prepared:
    """The calls of one shape. Functions are compiled several at a time, and operands are made afterwards.

    Functions stay jitted ones, since the profiler of some versions of jax takes no others; calling them finds what was
    compiled.
    """

    def __init__(self, shape: MoeShape, names: Sequence[str], threads: int) -> None:
        """Compile the layers named, the products, what is not a product, and what checks them."""
        self.shape = shape
        self.make = jax.jit(functools.partial(layers.operands, shape))
        self.given: Operands = jax.eval_shape(self.make)
        self.layers = {(which, name): layers.call(name, shape, which) for which in shape.passes for name in names}
        self.products = parts.products(shape, shape.passes[-1])
        self.others = {} if shape.weights else parts.others(shape)
        self.sequences = {
            (name, which): part(shape, which)
            for name, part in ((SEQUENCE, parts.sequence), (DENSE, parts.dense))
            for which in ([] if shape.weights else shape.passes)
        }
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            self.compiled = {key: pool.submit(job) for key, job in self._jobs().items()}
        self.right: dict[bytes, exact.Values] = {}

    def _jobs(self) -> dict[Key, Callable[[], Any]]:
        """What is compiled, by what it is for."""
        jobs: dict[Key, Callable[[], Any]] = {}
        for key, (fn, args) in reversed(self.layers.items()):  # a step has more kernels
            jobs[key] = functools.partial(_compile, fn, args(self.given))
            jobs["samples of " + key[0], key[1]] = functools.partial(self._samples, *key)
        timed = {(PRODUCTS, name): part for name, part in self.products.items()} | self.sequences
        timed |= {(OTHERS, name): part for name, part in self.others.items()}
        for key, part in timed.items():
            jobs[key] = functools.partial(_compile, part.fn, part.args(self.given))
        jobs["float64", ""] = self._exact
        jobs["operands", ""] = functools.partial(_compile, self.make, ())
        return jobs

    def _samples(self, which: str, name: str) -> Any:
        fn, args = self.layers[which, name]
        return _compile(jax.jit(functools.partial(exact.samples, self.shape)), (jax.eval_shape(fn, *args(self.given)),))

    def _exact(self) -> Any:
        given = (self.given.params, self.given.ct, self.given.routing.experts)
        with jax.enable_x64(True):
            return _compile(jax.jit(functools.partial(exact.values, self.shape)), given)

    def layer(self, x: Operands, which: str, name: str) -> tuple[JaxCall | None, Record]:
        """The call of a layer if its values are right, and its record without a time."""
        shape = self.shape
        limit = exact.limit(shape, which)
        record = Record(problem=shape.name, dtype=shape.label, which=which, contender=name, limit=limit)
        try:
            call = self.call(x, (which, name), self.layers[which, name])
            results = call()
            found, finite = self.compiled["samples of " + which, name].result()(results)
            error = exact.error(found, self._right(x, results[1])) if finite else float("inf")
        except Exception as failure:  # the other contenders are worth measuring
            return None, dataclasses.replace(record, why=reason_of(failure))
        if not error <= limit:
            return None, dataclasses.replace(record, error=error, why=f"wrong: relative error {error:.1e}")
        return call, dataclasses.replace(record, error=error)

    def _right(self, x: Operands, experts: Any) -> exact.Values:
        """The right results for the experts that a layer chose: logits are rounded, and ties broken, in other ways."""
        chosen = np.asarray(experts)
        key, most = chosen.tobytes(), int(np.bincount(chosen.ravel()).max())
        if most > exact.room(self.shape):
            raise ValueError(f"experts: want at most {exact.room(self.shape)} tokens of one; got {most}")
        if key not in self.right:
            with jax.enable_x64(True):
                self.right[key] = self.compiled["float64", ""].result()(x.params, x.ct, experts)
        return self.right[key]

    def call(self, x: Operands, key: Key, how: Sequence[Any]) -> JaxCall:
        """A function with its arguments, or the exception that compiling it raised."""
        self.compiled[key].result()
        fn, args, *_ = how
        return JaxCall(fn, args(x))

    def bytes_of(self, fn: Any, args: Callable[[Operands], Any]) -> int:
        """The bytes of what a function returns."""
        found = jax.tree.leaves(jax.eval_shape(fn, *args(self.given)))
        return sum(each.size * each.dtype.itemsize for each in found)

    def products_record(self, which: str, times: Mapping[str, Stats], why: str = "") -> Record:
        """The sum of the products of a pass as a record; its details have each of them."""
        names = list(parts.products(self.shape, which))
        record = Record(problem=self.shape.name, dtype=self.shape.label, which=which, contender=PRODUCTS)
        if missing := [name for name in names if name not in times]:
            return dataclasses.replace(record, why=why or f"no time of {', '.join(missing)}")
        seconds = {name: times[name].median for name in names}
        samples = min(times[name].samples or 1 for name in names)
        total = Stats(median=parts.total(seconds), samples=samples)
        return dataclasses.replace(record, time=total, details={"seconds": seconds})


def _compile(fn: Any, args: Sequence[Any]) -> Any:
    """The compiled function; once more if it fails, since many processes that start ptxas at once may run short."""
    try:
        return fn.lower(*args).compile()
    except Exception as failure:
        if "ptxas" not in str(failure):
            raise
        time.sleep(PAUSE_S)
        return fn.lower(*args).compile()
