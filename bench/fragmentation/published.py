"""Figures that others published, and how they follow from a layout: what the simulated rows are checked against."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PUBLISHED", "PublishedWaste", "one_table_waste"]


@dataclass(frozen=True, slots=True)
class PublishedWaste:
    """A share of KV memory that one table for all layers wastes.

    Attributes:
        model: the model.
        needed: tokens that each layer needs, for the sequence of the publication.
        tokens: tokens of the sequence, which one table holds for every layer.
        wasted_pct: the published figure.
        source: where it was published.
    """

    model: str
    needed: tuple[int, ...]
    tokens: int
    wasted_pct: float
    source: str


_JENGA = "Jenga (arXiv 2503.18292), and vLLM's notes on its hybrid cache manager"

PUBLISHED = (
    # 32 layers attend to the text, 8 to the image, of a request of MMMU-pro: 43 and 6193 tokens on average.
    PublishedWaste("Llama 3.2 11B Vision", (43,) * 32 + (6193,) * 8, 43 + 6193, 79.6, _JENGA),
    # Every second layer has a window of 4096; 8192 tokens, the model's longest.
    PublishedWaste("Gemma 2", (8192, 4096) * 21, 8192, 25.0, _JENGA),
    # Three of four layers have a window of 32768; 131072 tokens, the model's longest.
    PublishedWaste("Ministral 8B", (131_072, 32_768, 32_768, 32_768) * 9, 131_072, 56.25, _JENGA),
)


def one_table_waste(needed: tuple[int, ...], tokens: int) -> float:
    """Share of slots (in %) that no layer needs when one table holds all `tokens` for all layers."""
    return 100 * (1 - sum(needed) / (len(needed) * tokens))
