"""All schemes, in the order of the report: from reservation to per-head pages."""

from __future__ import annotations

from bench.fragmentation.schemes.base import Scheme
from bench.fragmentation.schemes.contiguous import Buddy, ContiguousExact, ContiguousMax
from bench.fragmentation.schemes.hf import TransformersPaged
from bench.fragmentation.schemes.ours import Lockstep, PerHead, PerLayer, RunAware
from bench.fragmentation.schemes.paged import GroupTables, PrivatePools
from bench.fragmentation.schemes.rectangle import DynamicReplay, StaticRectangle

__all__ = ["SCHEMES", "Scheme"]

SCHEMES: dict[str, type[Scheme]] = {
    scheme.key: scheme
    for scheme in (
        ContiguousMax, Buddy, ContiguousExact, StaticRectangle, DynamicReplay, TransformersPaged, GroupTables,
        PrivatePools, Lockstep, PerLayer, PerHead, RunAware,
    )
}  # fmt: skip
