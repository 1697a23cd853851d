"""What the TPU compiler makes of a call, without a TPU.

    from trencadis import inspect as tpu
    print(tpu.inspect(fn, *args, generation="v6e"))

The compiler is the real one: libtpu runs ahead of time on any machine.

aot, worker                         compile the call in a process of its own
bundles                             read the schedule that the compiler dumps
basic_blocks, scoreboard            cut it into basic blocks, and say how many cycles each takes
kernel_operands                     compute the integers that a kernel is called with
scalar_program, scalar_arithmetic   translate its scalar instructions into Python
simulator                           run them with those integers, against the clock
collectives                         the bytes that devices exchange in a compiled program
inspection, report                  `inspect`, and the values that it returns
"""

from trencadis.core.devices import CHIPS, Chip, chip_of
from trencadis.inspect.aot import CompilerMissing
from trencadis.inspect.bundles import UnknownSchedule
from trencadis.inspect.inspection import inspect
from trencadis.inspect.report import Block, Inspection, Kernel, Operation

__all__ = [
    "CHIPS",
    "Block",
    "Chip",
    "CompilerMissing",
    "Inspection",
    "Kernel",
    "Operation",
    "UnknownSchedule",
    "chip_of",
    "inspect",
]
