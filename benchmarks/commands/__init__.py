"""The commands of `python -m benchmarks`, a module for each; each has a `main` that takes the parsed arguments."""
