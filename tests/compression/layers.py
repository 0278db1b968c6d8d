"""Layers small enough to compute keep-sets by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paged_kv.compression import LiveTokens
from paged_kv.live import RecentQueries


def layer(
    *heads: Sequence[Sequence[float]],
    lanes: int = 1,
    values: Sequence[Sequence[Sequence[float]]] | None = None,
    positions: Sequence[int] | None = None,
    seen: int | None = None,
    queries: Sequence[Sequence[Sequence[float]]] | None = None,
) -> LiveTokens:
    """One layer whose KV heads hold the given keys, in one lane or one each; values as the keys by default."""
    keys = torch.tensor(heads, dtype=torch.float32)
    held = keys if values is None else torch.tensor(values, dtype=torch.float32)
    live = keys.shape[1]
    at = np.arange(live) if positions is None else np.asarray(positions)
    recent = None if queries is None else RecentQueries(torch.tensor(queries, dtype=torch.float32), 1.0)
    return LiveTokens(
        layer=0,
        keys=list(keys.chunk(lanes)),
        values=list(held.chunk(lanes)),
        positions=[at] * lanes,
        seen_len=live if seen is None else seen,
        queries=recent,
    )


def pulled(*strengths: float) -> list[list[float]]:
    """Keys that the query [1, 0] gives logits of the given strengths."""
    return [[strength, 0.0] for strength in strengths]


#: A query that reads the first channel of a key.
READS_FIRST = [1.0, 0.0]
