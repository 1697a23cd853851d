"""The command line: `trencadis show`, `show-gemm`, `why`, `inspect` and `doctor`."""
