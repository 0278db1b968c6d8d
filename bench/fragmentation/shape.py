"""The model and the memory that all schemes share."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an 8-billion-parameter model with grouped KV heads, in bf16, and of the memory for its cache.

    Attributes:
        layers: layers with K and V.
        heads: KV heads a layer.
        head_bytes: bytes of one token's K and V in one head of one layer.
        pool_tokens: uncropped tokens (all layers) that the memory holds: the equal bytes of every scheme.
        page_size: tokens a page.
        model_max: longest sequence the model accepts; what a scheme without knowledge has to reserve.
    """

    layers: int = 32
    heads: int = 8
    head_bytes: int = 512
    pool_tokens: int = 131_072
    page_size: int = 16
    model_max: int = 16_384

    @property
    def pool_slots(self) -> int:
        """The pool in slots of one head of one layer: the unit of all figures here."""
        return self.pool_tokens * self.layers * self.heads

    @property
    def pool_bytes(self) -> int:
        """The pool in bytes."""
        return self.pool_slots * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.page_size * self.heads * self.head_bytes
