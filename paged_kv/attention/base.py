"""What an attention backend is given and what it promises.

Owns: the options of one attention call, the `Backend` protocol, and how a handle travels with the key tensor
from `Cache.update` to the attention function.
Does not know: transformers, page tables, masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from paged_kv.forward import HANDLE
from paged_kv.store import LayerView


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a model asks of one attention call, besides the tokens.

    Attributes:
        scale: Factor on the logits, usually `head_dim ** -0.5`.
        softcap: Logits become `softcap * tanh(logits / softcap)` before masking (Gemma 2), None for no cap.
        sinks: `[q_heads]`, one extra logit per head that only takes part in the softmax's sum (GPT-OSS), or None.
        causal: False lets every query see all live tokens (cross-attention).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    causal: bool = True


@runtime_checkable
class Backend(Protocol):
    """Attention over pages for any mix of rows and live lengths, in one call.

    Query `j` of a row with `n` queries and `live` tokens sees live indices `kv_start <= i <= live - n + j`
    (all from `kv_start` when not causal). Query head `h` reads KV head `h // (q_heads // kv_heads)`. A query that sees
    nothing yields zeros.
    """

    name: str

    def unsupported(self, query: Tensor, view: LayerView, options: AttentionOptions) -> str | None:
        """Why this call cannot run here, or None."""
        ...

    def attend(self, query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
        """Attend packed queries `[tokens, q_heads, key_width]`; returns `[tokens, q_heads, value_width]`."""
        ...


class Handle(Protocol):
    """What an engine's cache ties to the key tensor that its `update` returns."""

    def attend(self, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend `query` `[rows, q_heads, columns, key_width]`; returns `[rows, columns, q_heads, value_width]`."""
        ...


def handle_of(key: Tensor) -> Any | None:
    """What `update` tied to a key tensor: a `LayerHandle`, a `Handle`, or None for a plain tensor."""
    return getattr(key, HANDLE, None)


def tie(key: Tensor, handle: Handle) -> Tensor:
    """Tie a handle to a key tensor, which carries it to the attention function; returns the tensor."""
    setattr(key, HANDLE, handle)
    return key
