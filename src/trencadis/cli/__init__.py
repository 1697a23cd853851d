"""The command line: `trencadis show`, `why`, `inspect` and `doctor`."""
