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

from trencadis.core.devices import CHIPS as CHIPS
from trencadis.core.devices import Chip as Chip
from trencadis.core.devices import chip_of as chip_of
from trencadis.inspect.aot import CompilerMissing as CompilerMissing
from trencadis.inspect.bundles import UnknownSchedule as UnknownSchedule
from trencadis.inspect.inspection import inspect as inspect
from trencadis.inspect.report import Block as Block
from trencadis.inspect.report import Inspection as Inspection
from trencadis.inspect.report import Kernel as Kernel
from trencadis.inspect.report import Operation as Operation
