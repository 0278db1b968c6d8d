"""Benchmarks of compression: every press of kvpress, memory by method, throughput at a fixed pool."""
