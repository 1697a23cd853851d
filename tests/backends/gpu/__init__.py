"""A package, so that its modules may have the names of those of the other kernels."""
