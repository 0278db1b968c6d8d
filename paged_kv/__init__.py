"""Paged KV cache for Hugging Face models: a page table for every layer of every sequence over one page pool."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
