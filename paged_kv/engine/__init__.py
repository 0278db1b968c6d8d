"""A continuous-batching engine for transformers decoders over per-layer pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_kv.engine.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from paged_kv.engine.compress import Compression
from paged_kv.engine.params import InvalidParams, RequestOutputKind, SamplingParams
from paged_kv.engine.request import CompletionOutput, RequestOutput
from paged_kv.engine.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from paged_kv.engine.engine import Engine
    from paged_kv.engine.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Compression",
    "Engine",
    "InvalidParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that requests and the scheduler can be imported without torch.
    if name == "LLM":
        from paged_kv.engine.llm import LLM

        return LLM
    if name == "Engine":
        from paged_kv.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
