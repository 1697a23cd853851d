"""Benchmarks against named peers: `python -m benchmarks --help`. They are not part of the wheel."""
