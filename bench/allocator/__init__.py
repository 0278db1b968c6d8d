"""What the allocator costs, beside the structures that others use, in one run: ``python -m bench.allocator``."""
