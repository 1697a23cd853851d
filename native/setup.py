"""Builds the kernels against the headers that come with jaxlib; a compiler with C++17 is all that they need."""

import jax.ffi
from setuptools import Extension, setup

# No -march: each kernel is compiled for the instructions of its own machine, and the library runs on all of them.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wno-psabi"]

setup(
    ext_modules=[
        Extension(
            "trencadis_cpu._kernels",
            ["src/handlers.cc"],
            depends=[
                f"src/{name}.h" for name in ("buffers", "fused", "kernel", "machines", "places", "program", "tiles")
            ],
            include_dirs=[jax.ffi.include_dir()],
            extra_compile_args=FLAGS,
            language="c++",
        )
    ]
)
