"""Paged KV cache for Hugging Face models: a page table for every layer of every sequence over one page pool.

Importing it adds the attentions "paged_kv" and "paged_kv_packed" to transformers' registries and changes nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paged_kv.attention.attach import attached, detach, register
from paged_kv.cache import PagedCache
from paged_kv.compression import pressing as _pressing  # noqa: F401 - cooperates with kvpress where it is installed
from paged_kv.spec import KVSpec, UnsupportedModel

if TYPE_CHECKING:
    from paged_kv.engine import (
        LLM,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from paged_kv.engine.intake import TextPrompt, TokensPrompt
    from paged_kv.optimize import optimize_for_cpu

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "KVSpec",
    "PagedCache",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModel",
    "__version__",
    "attached",
    "detach",
    "optimize_for_cpu",
]

#: Names that cost an import of their own, and where they are.
_LAZY = {
    "LLM": "paged_kv.engine",
    "BeamSearchOutput": "paged_kv.engine",
    "BeamSearchParams": "paged_kv.engine",
    "BeamSearchSequence": "paged_kv.engine",
    "CompletionOutput": "paged_kv.engine",
    "RequestOutput": "paged_kv.engine",
    "RequestOutputKind": "paged_kv.engine",
    "SamplingParams": "paged_kv.engine",
    "StructuredOutputsParams": "paged_kv.engine",
    "TextPrompt": "paged_kv.engine.intake",
    "TokensPrompt": "paged_kv.engine.intake",
    "optimize_for_cpu": "paged_kv.optimize",
}

register()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'paged_kv' has no attribute {name!r}")
