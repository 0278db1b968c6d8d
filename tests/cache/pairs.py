"""A model over pages beside the float64 oracle, fed and cropped alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paged_kv import PagedCache
from tests.oracle import MaskedOracle
from tests.tiny import padded, tiny_model


def positions_of(cache: PagedCache, layer: int, row: int, lane: int = 0) -> np.ndarray:
    batch = cache._batch
    assert batch is not None
    return cache.memory.positions(batch.seqs[row], layer, lane)


class Pair:
    """A model over pages and the oracle, fed and cropped alike."""

    def __init__(self, family: str, num_rows: int = 1, length: int = 40, **options: Any) -> None:
        self.model = tiny_model(family)
        pads = [0, 11, 23][:num_rows]
        self.inputs = padded(num_rows, length, pads)
        self.oracle = MaskedOracle(self.model)
        self.cache = PagedCache.for_model(self.model, **options)
        self.mask = self.inputs["attention_mask"]
        self.step(self.inputs["input_ids"], self.mask)

    def step(self, ids: torch.Tensor, real: torch.Tensor | None = None) -> None:
        """Feed new tokens to both and compare the logits of the real ones."""
        first = self.cache.get_seq_length() == 0
        self.mask = self.mask if first else torch.cat([self.mask, torch.ones_like(ids)], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad():
            got = self.model(
                ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache
            ).logits.double()
        expected = self.oracle.forward(ids, self.mask[:, -ids.shape[1] :])
        seen = self.mask[:, -ids.shape[1] :].bool()
        torch.testing.assert_close(got[seen], expected[seen], rtol=0, atol=1e-4)
        self.cache.check()

    def follow(self) -> None:
        """Tell the oracle what the cache still holds."""
        for layer in self.cache.memory.layers:
            for row in range(self.inputs["input_ids"].shape[0]):
                lanes = self.cache.memory.place(layer)[0].spec.lanes
                for lane in range(lanes):
                    kept = positions_of(self.cache, layer, row, lane)
                    self.oracle.crop(layer, row, kept, head=None if lanes == 1 else lane)
