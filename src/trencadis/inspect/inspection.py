"""The function `inspect`: compile a call, read its schedules, simulate them, and report."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trencadis.core.devices import Chip, chip_of
from trencadis.inspect import report
from trencadis.inspect.aot import Compiled, compile_for
from trencadis.inspect.basic_blocks import flow
from trencadis.inspect.bundles import Schedule, UnknownSchedule, libtpu_version, programs, read
from trencadis.inspect.scalar_program import ScalarProgram, input_shapes, translate
from trencadis.inspect.simulator import FREE, SUSTAINED, Simulator, Trace


def inspect(
    fn: Callable[..., Any],
    *args: Any,
    generation: str = "v6e",
    xla: bool = False,
    flops: float | None = None,
    dump: str | pathlib.Path | None = None,
    timeout: float = 900,
) -> report.Inspection:
    """Compile a call for a TPU generation, without a TPU, and say what it would take.

    Args:
        fn: A function of arrays, jitted or not. It runs on one device.
        *args: Its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them. Integer arrays count with their values:
            they steer loops and index maps. Of all others only shape and dtype matter.
        generation: "v4", "v5e", "v5p", "v6e", "v7x", or a kind of device such as "TPU v6 lite".
        xla: Also cost the operations that XLA makes around the Pallas kernels, or instead of them.
        flops: Useful operations of the call, for a share of the chip's peak.
        dump: A folder to keep the compiler's dump in; by default it is removed.
        timeout: Seconds after which the compiler is given up.

    Returns:
        What the compiler and the simulator say. A call that does not compile, say for want of VMEM, is an
        answer too: `compiled` is False, and `message` is the compiler's. Errors in tracing the function are raised.

    Raises:
        CompilerMissing: If libtpu is not installed, or does not start.
        UnknownSchedule: If the compiler's dump is of a form that is not known, or a kernel goes where its data lead it.

    >>> import jax, jax.numpy as jnp
    >>> from jax.experimental import pallas as pl
    >>> def double(x, y):
    ...     y[...] = x[...] * 2
    >>> x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    >>> kernel, = inspect(pl.pallas_call(double, out_shape=x), x, generation="v5e").kernels
    >>> kernel.bytes_in == kernel.bytes_out == 512 * 1024 * 4
    True
    """
    chip = chip_of(generation)
    with tempfile.TemporaryDirectory(prefix="trencadis-") as scratch:
        folder = pathlib.Path(scratch if dump is None else dump).absolute()
        compiled = compile_for(chip, fn, args, folder, timeout=timeout)
        answer = report.Inspection(
            generation=chip.name,
            jax=jax.__version__,
            libtpu=libtpu_version(),
            compiled=compiled.error is None,
            message=compiled.error,
            flops=flops,
        )
        if not answer.compiled:
            return answer
        kernels, operations = _programs(compiled, chip, args, xla=xla)
    counted = {kernel.name for kernel in kernels} | {operation.name for operation in operations or ()}
    loops = [loop for loop, names in compiled.uncounted.items() if counted.intersection(names)]
    notes = list(compiled.notes)
    if loops:
        notes.append(f"how often a loop of XLA runs is not known, it counts once: {', '.join(loops)}")
    return dataclasses.replace(answer, kernels=kernels, operations=operations, warnings=tuple(notes))


def _programs(
    compiled: Compiled, chip: Chip, args: Sequence[Any], *, xla: bool
) -> tuple[tuple[report.Kernel, ...], tuple[report.Operation, ...] | None]:
    files = programs(compiled.folder)
    bodies = {kernel["body"]: files.pop(kernel["name"]) for kernel in compiled.kernels if kernel["name"] in files}
    calls = list(compiled.calls)
    written: dict[str, Mapping[int, list[int]]] = {}  # integers in the results of kernels that ran
    kernels = []
    for kernel in compiled.kernels:
        name = kernel["name"]
        if kernel["body"] not in bodies:  # the compiler compiles equal kernels once
            raise UnknownSchedule(f"{name}: the dump has no bundles of this kernel", compiled.folder)
        call = next((c for c in calls if c["body"] == kernel["body"]), None)
        if call is not None:
            calls.remove(call)
        values = kernel["values"] | (call["values"] if call else {})
        for i, (source, result) in enumerate(kernel["sources"]):
            if result in written.get(source, {}):
                values[i] = written[source][result]
        schedule = read(name, bodies[kernel["body"]], folded=chip.delay_slots != 4)
        program = translate(schedule, flow(schedule, chip), values)
        trace = Simulator(program, chip).run()
        written[name] = trace.results
        kernels.append(_kernel(program, chip, trace, runs=compiled.times.get(name, 1)))
    if not xla:
        return tuple(kernels), None
    shapes = _values_by_shape(args)
    operations = [_operation(name, path, chip, shapes, compiled.times.get(name, 1)) for name, path in files.items()]
    return tuple(kernels), tuple(sorted(operations, key=lambda op: -op.total))


def _kernel(program: ScalarProgram, chip: Chip, trace: Trace, *, runs: int) -> report.Kernel:
    schedule = program.schedule
    free = Simulator(program, chip, FREE).run()
    cycles = max(1, trace.cycles)
    busy = sum(block.mxu * n for block, n in zip(program.flow.blocks, trace.runs, strict=True))
    return report.Kernel(
        name=schedule.name,
        runs=runs,
        bundles=len(schedule.bundles),
        vmem_bytes=schedule.vmem.bytes,
        spill_bytes=schedule.vmem.spill_bytes,
        cycles=trace.cycles,
        seconds=trace.cycles / chip.clock,
        mxu_busy=busy / cycles,
        dma_wait=trace.waited / cycles,
        bytes_in=trace.bytes_in,
        bytes_out=trace.bytes_out,
        copies=trace.copies,
        compute_seconds=free.cycles / chip.clock,
        dma_seconds=(trace.bytes_in + trace.bytes_out) / (chip.hbm * SUSTAINED),
        blocks=_blocks(program, trace),
        operands_known=tuple(sorted(program.values)),
        warnings=_warnings(program, trace),
    )


def _blocks(program: ScalarProgram, trace: Trace) -> tuple[report.Block, ...]:
    bundles = program.schedule.bundles
    rows = []
    for block, runs, wait in zip(program.flow.blocks, trace.runs, trace.waits, strict=True):
        if runs == 0:
            continue
        count = {name: block.counts.get(name, 0) for name in ("vmatmul", "vmatpush", "vld", "vst", "mask")}
        rows.append(
            report.Block(
                first=bundles[block.first].address, last=bundles[block.end - 1].address, runs=runs,
                bundles=block.end - block.first, cycles=block.cycles, wait=wait / runs,
                share=(block.cycles * runs + wait) / max(1, trace.cycles), mxu_busy=block.mxu / max(1, block.cycles),
                spills=block.counts.get("spill", 0), copies=block.counts.get("dma", 0), **count,
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.share))


def _warnings(program: ScalarProgram, trace: Trace) -> tuple[str, ...]:
    found = []
    if trace.unfinished:
        found.append("the program was given up before its end: the time is a lower bound")
    if program.not_understood:
        many = sum(program.not_understood.values())
        names = ", ".join(sorted(program.not_understood)[:6])
        found.append(f"{many} scalar instructions were not understood ({names}); nothing was decided by them")
    if trace.missing:
        shapes = input_shapes(program.schedule)
        which = ", ".join(f"{i} ({shapes.get(i, '?')})" for i in sorted(trace.missing))
        found.append(f"it reads values that are not known, and that are taken as 0 or 42: operand {which}")
    if trace.unmet:
        found.append(f"{trace.unmet} waits for something other than a copy of this core: taken as met at once")
    return tuple(found)


def _operation(
    name: str, path: pathlib.Path, chip: Chip, shapes: Mapping[str, list[int]], runs: int
) -> report.Operation:
    schedule = read(name, path, folded=chip.delay_slots != 4)
    try:
        program, trace = _followed(schedule, chip, shapes)
    except UnknownSchedule as error:
        why = str(error).splitlines()[0].removeprefix(f"{name}: ")
        return report.Operation(
            name=name, runs=runs, bundles=len(schedule.bundles), cycles=None, seconds=None, mxu_busy=0.0,
            bytes_in=0, bytes_out=0, warnings=(why,),
        )  # fmt: skip
    busy = sum(block.mxu * n for block, n in zip(program.flow.blocks, trace.runs, strict=True))
    return report.Operation(
        name=name, runs=runs, bundles=len(schedule.bundles), cycles=trace.cycles, seconds=trace.cycles / chip.clock,
        mxu_busy=busy / max(1, trace.cycles), bytes_in=trace.bytes_in, bytes_out=trace.bytes_out,
        warnings=_warnings(program, trace),
    )  # fmt: skip


def _followed(schedule: Schedule, chip: Chip, shapes: Mapping[str, list[int]]) -> tuple[ScalarProgram, Trace]:
    """Simulate an operation of XLA with the caller's integers, matched by shape: the dump names no operands."""
    given = {i: shapes[shape] for i, shape in input_shapes(schedule).items() if shape in shapes}
    program = translate(schedule, flow(schedule, chip), given)
    return program, Simulator(program, chip).run()


def _values_by_shape(args: Sequence[Any]) -> dict[str, list[int]]:
    values = {"s32[1]": [0]}
    for x in jax.tree.leaves(tuple(args)):
        if not isinstance(x, jax.ShapeDtypeStruct) and np.asarray(x).dtype.kind in "iu":
            values[f"s32[{','.join(map(str, np.shape(x)))}]"] = np.asarray(x).astype(np.int64).ravel().tolist()
    return values
