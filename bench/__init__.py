"""Benchmarks of paged-kv. They are commands (`python -m bench.NAME`) and not part of the installed package."""
