"""What the TPU compiler makes of a call, without a TPU.

    from trencadis import tpu
    print(tpu.inspect(fn, *args, generation="v6e"))

The compiler is the real one: libtpu runs ahead of time on any machine. `aot` compiles, `bundles` reads the schedule,
`blocks` and `scoreboard` say what each block of it takes, `scalar` and `machine` run it with the caller's integers.
"""

from trencadis.chips import CHIPS as CHIPS
from trencadis.chips import Chip as Chip
from trencadis.chips import chip_of as chip_of
from trencadis.tpu.aot import CompilerMissing as CompilerMissing
from trencadis.tpu.bundles import UnknownSchedule as UnknownSchedule
from trencadis.tpu.inspection import inspect as inspect
from trencadis.tpu.report import Block as Block
from trencadis.tpu.report import Inspection as Inspection
from trencadis.tpu.report import Kernel as Kernel
from trencadis.tpu.report import Operation as Operation
