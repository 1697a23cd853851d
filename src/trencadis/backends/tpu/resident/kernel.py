"""The kernel of the general grouped GEMM: matrices of any size in flat buffers, from HBM to HBM in one pass.

A basic block computes some products, and meanwhile aligns a chunk of an operand that later ones need, and collects
results of earlier ones. What does not fit into the basic blocks is done between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import Condition, Ref, i32
from trencadis.backends.tpu.ragged.flat import TILE, tail_of, whole
from trencadis.backends.tpu.resident import seam
from trencadis.backends.tpu.resident.align import Operand
from trencadis.backends.tpu.resident.collect import Collector
from trencadis.backends.tpu.resident.epilogue import Epilogue
from trencadis.backends.tpu.resident.products import Products
from trencadis.backends.tpu.resident.sizes import PAIR, Sizes
from trencadis.backends.tpu.resident.state import State
from trencadis.backends.tpu.resident.stream import Stream
from trencadis.backends.tpu.resident.table import Table

NAMES = (*Stream.NAMES, *Products.NAMES, *Collector.NAMES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The kernel of one problem: both operands, which have one dtype, the epilogue, and the entries of its table."""

    lhs: Operand
    rhs: Operand
    epilogue: Epilogue
    entries: int
    sizes: Sizes
    precision: Any
    flops: int

    def scratch(self) -> dict[str, Any]:
        """The scratch shapes of the kernel, by name."""
        return {
            "state": State.scratch(NAMES),
            **Stream.scratch((self.rhs, self.lhs)),
            **Products.scratch(self.lhs),
            **Collector.scratch(self.epilogue, self.sizes),
        }

    def run(
        self, lhs: jax.Array, rhs: jax.Array, table: jax.Array, extras: dict[str, jax.Array], **options: Any
    ) -> jax.Array:
        """The flat result; `extras` are as in `Epilogue.operands`."""
        operands = {
            "table": table, "lhs": lhs, "lhs_tail": tail_of(lhs), "rhs": rhs, "rhs_tail": tail_of(rhs),
            **self.epilogue.operands(extras),
        }  # fmt: skip
        length, dtype = self.epilogue.length, self.epilogue.dtype
        results = {"out": jax.ShapeDtypeStruct((length,), dtype), "out_tail": jax.ShapeDtypeStruct((TILE,), dtype)}
        results |= seam.results(self.epilogue, self.sizes)
        names, scratch = list(operands), self.scratch()

        def kernel(*refs: Ref) -> None:
            outside = [*names, *results]
            hbm, vmem = dict(zip(outside, refs, strict=False)), dict(zip(scratch, refs[len(outside) :], strict=True))
            self._kernel(hbm, vmem)

        aliases = {names.index(old): i for i, old in enumerate(("existing", "existing_tail")) if old in names}
        moved = lhs.nbytes + rhs.nbytes + length * dtype.itemsize * (1 + self.epilogue.accumulate)
        out, tail, *seams = pl.pallas_call(
            kernel,
            out_shape=list(results.values()),
            grid=(self.sizes.cores,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM if n in ("table", "numbers") else pltpu.HBM) for n in names],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(results),
            scratch_shapes=list(scratch.values()),
            input_output_aliases=aliases,
            cost_estimate=pl.CostEstimate(flops=self.flops, bytes_accessed=moved, transcendentals=0),
            name="trencadis_resident",
            **options,
        )(*operands.values())
        main = whole(length)
        if main < length:
            out = lax.dynamic_update_slice(out, lax.slice(tail, (0,), (length - main,)), (np.int32(main),))
        return seam.merged(out, *seams, table=table, entries=self.entries) if seams else out

    def _kernel(self, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> None:
        state = State(vmem["state"], NAMES)
        core = pl.program_id(0) if self.sizes.cores > 1 else i32(0)
        table = Table(hbm["table"], self.entries, core, self.sizes.cores)
        stream = Stream((self.rhs, self.lhs), table, state, hbm, vmem)
        products = Products(stream, state, self.precision)
        collector = Collector(self.epilogue, products, state, hbm, vmem)
        stream.start()
        products.start()
        collector.start()
        _while(lambda: state["entry"] < table.end, lambda: self._entry(stream, products, collector))
        _while(lambda: jnp.logical_not(collector.finished()), collector.step)
        collector.drain()

    def _entry(self, stream: Stream, products: Products, collector: Collector) -> None:
        """Compute the products of an entry."""
        entry = products.state["entry"]
        _while(lambda: jnp.logical_not(stream.aligned(entry, i32(0))), stream.step)
        _while(lambda: jnp.logical_not(products.sums.fits(products.vectors(entry))), collector.step)
        products.open()

        def some() -> None:
            pl.when(self._wants_panel(products))(lambda: self._open_panels(stream, products, collector))
            self._basic_block(stream, products, collector)

        _while(products.more, some)
        products.close()

    def _open_panels(self, stream: Stream, products: Products, collector: Collector) -> None:
        """Open as many panels as a basic block has products of; align and collect what that needs."""
        _while(lambda: self._lacks_panel(stream, products) & stream.ready(), stream.step)
        _while(lambda: self._lacks_room(products) & collector.ready(), collector.step)
        _while(lambda: self._can_open(stream, products), products.open_panel)

    def _wants_panel(self, products: Products) -> Condition:
        """Whether the open panels have fewer products than a basic block, and there are more panels."""
        state = products.state
        few = products.available() < i32(self.sizes.products)
        return few & (state["opened"] + i32(1) < products.table.field("panels", state["entry"]))

    def _lacks_panel(self, stream: Stream, products: Products) -> Condition:
        """Whether the operands of the panel that is opened next are not aligned."""
        state = products.state
        aligned = stream.aligned(state["entry"], state["opened"] + i32(1))
        return self._wants_panel(products) & jnp.logical_not(aligned)

    def _lacks_room(self, products: Products) -> Condition:
        """Whether there is no room for the sums of the panel that is opened next."""
        fits = products.sums.fits(products.vectors(products.state["entry"]))
        return self._wants_panel(products) & jnp.logical_not(fits)

    def _can_open(self, stream: Stream, products: Products) -> Condition:
        """Whether another panel is opened."""
        lacks = self._lacks_panel(stream, products) | self._lacks_room(products)
        return self._wants_panel(products) & jnp.logical_not(lacks)

    def _basic_block(self, stream: Stream, products: Products, collector: Collector) -> None:
        """Compute some products, and meanwhile align and collect a little."""
        count, strides = products.available(), products.strides()
        sizes, job = self.sizes, products.job(strides)
        aligns = stream.ready() if sizes.overlap else jnp.bool_(False)
        if sizes.overlap:
            pl.when(aligns)(stream.prepare)
        work: list[tuple[int, Callable[[int], None]]] = []
        slots = range(sizes.row_slots)
        rows, converts = (collector.rows_left(), collector.converts_left()) if slots else (i32(0), i32(0))
        converters = [collector.converter(i32(slot), i32(slot) < converts) for slot in slots]
        work.append((sizes.converted * len(slots), lambda i: converters[i % len(slots)]([i // len(slots)])))
        writers = [collector.row_writer(i32(slot), i32(slot) < rows) for slot in slots]
        # all rows of a slot before those of the next: what is written past the end of a row is overwritten
        work.append((sizes.slot_rows * len(slots), lambda i: writers[i // sizes.slot_rows](i % sizes.slot_rows)))
        if sizes.overlap:
            work.append((sizes.rows // PAIR, stream.stager(aligns & stream.has_rows())))
        for i in range(sizes.products):
            for count_of, do in work:
                for number in range(count_of * i // sizes.products, count_of * (i + 1) // sizes.products):
                    do(number)
            products.compute(job, strides, i32(i) < count)
            job = products.following(job, strides)
        products.advance(count)
        if sizes.overlap:
            pl.when(aligns)(stream.finish_staged)
        if slots:
            collector.advance(*(jnp.minimum(each, i32(sizes.row_slots)) for each in (rows, converts)))


def _while(condition: Callable[[], Condition], body: Callable[[], None]) -> None:
    """Repeat something while a condition on the state holds."""

    def step(go: Condition) -> Condition:
        del go
        body()
        return condition()

    lax.while_loop(lambda go: go, step, jnp.asarray(condition()))
