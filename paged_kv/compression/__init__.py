"""Methods that choose which tokens a layer keeps, budgets across layers and heads, and when to crop."""

from paged_kv.compression.adakv import AdaKV
from paged_kv.compression.apply import compress, compressing, crop, record_queries
from paged_kv.compression.base import LiveTokens, Policy, ScorePolicy, attention_of_newest
from paged_kv.compression.budgets import pyramid, uniform
from paged_kv.compression.combine import Chain, MinBudget, PerLayer, Protect
from paged_kv.compression.errors import BudgetTooSmall, NeedsQueries, UnsupportedMethod
from paged_kv.compression.expected import ExpectedAttention
from paged_kv.compression.h2o import H2O
from paged_kv.compression.knorm import KeyNorm
from paged_kv.compression.lagkv import LagKV
from paged_kv.compression.random import Random
from paged_kv.compression.rotary import Rotary
from paged_kv.compression.snapkv import SnapKV
from paged_kv.compression.streaming import StreamingLLM
from paged_kv.compression.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "BudgetTooSmall",
    "Chain",
    "ExpectedAttention",
    "KeyNorm",
    "LagKV",
    "LiveTokens",
    "MinBudget",
    "NeedsQueries",
    "PerLayer",
    "Policy",
    "Protect",
    "Random",
    "Rotary",
    "ScorePolicy",
    "SnapKV",
    "StreamingLLM",
    "UnsupportedMethod",
    "attention_of_newest",
    "compress",
    "compressing",
    "crop",
    "pyramid",
    "record_queries",
    "uniform",
]
