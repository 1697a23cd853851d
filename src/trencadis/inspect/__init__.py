"""What the TPU compiler makes of a call, without a TPU.

    from trencadis import inspect as tpu
    print(tpu.inspect(fn, *args, generation="v6e"))

The compiler is the real one: libtpu runs ahead of time on any machine. `aot` compiles, `bundles` reads the schedule,
`blocks` and `scoreboard` say what each block of it takes, `scalar` and `machine` run it with the caller's integers.
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
