"""Methods that choose which tokens a layer keeps."""

from paged_kv.compression.base import LiveTokens, Policy, ScorePolicy
from paged_kv.compression.knorm import KeyNorm
from paged_kv.compression.streaming import StreamingLLM

__all__ = ["KeyNorm", "LiveTokens", "Policy", "ScorePolicy", "StreamingLLM"]
