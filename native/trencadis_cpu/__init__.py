"""The native CPU kernels of trencadis, which are custom calls of XLA. `trencadis` imports this package if it is there.

`TARGETS` are the handlers by the name of their custom calls, as `jax.ffi.register_ffi_target` takes them, and
`INSTRUCTIONS` is the name of the instructions that they use on this machine, empty if there are none in particular.
"""

import ctypes
import pathlib

import jax

__version__ = "0.1.0"
__all__ = ["INSTRUCTIONS", "INTERFACE", "TARGETS"]

INTERFACE = 2  # of the handlers: which buffers and attributes they take

try:
    _library = ctypes.CDLL(str(next(pathlib.Path(__file__).parent.glob("_kernels*.so"))))
except StopIteration:
    raise ImportError("its library is not built") from None
except OSError as error:
    raise ImportError(f"its library does not load: {error}") from error
_library.trencadis_instructions.restype = ctypes.c_char_p

INSTRUCTIONS: str = _library.trencadis_instructions().decode()
_NAMES = ("trencadis_grouped", "trencadis_ragged", "trencadis_fused")
TARGETS = {name: jax.ffi.pycapsule(getattr(_library, name)) for name in _NAMES}
