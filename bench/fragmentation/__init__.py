"""How ways of managing KV memory waste it: simulated on request traces, at equal bytes, with the real allocator.

`python -m bench.fragmentation --out DIR` (see `docs/fragmentation.md`).
"""
