"""Benchmarks against named peers; not part of the wheel. Run with `python -m benchmarks.run`."""
