"""Attention modules whose queries, keys and values are one operation, rotary embedding included.

Owns: how such a module is recognised, what it does with a cache that hands on handles (`HandlesOnly`).
Does not know: how a handle attends, which modules of a model are tried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from paged_kv._compat import CACHE_KEYWORD, attention_of
from paged_kv.attention.attach import PACKED_ATTENTION
from paged_kv.attention.base import AttentionOptions, handle_of, tie
from paged_kv.forward import HandlesOnly
from paged_kv.optimize.fusing import FuseUndo, change, packed_and_unwatched, without_graph
from paged_kv.optimize.packing import PackedLinear

_PARTS = ("q_proj", "k_proj", "v_proj")
_Rotary = tuple[Tensor, Tensor]


class FusedAttention:
    """What an attention module does with a cache that hands on handles; mixed into the class that it had.

    With any other cache, with a mask, in training, for gradients, and while its projections have hooks or were replaced
    it does what it did before.
    """

    training: bool
    head_dim: int
    layer_idx: int
    o_proj: nn.Module
    _modules: dict[str, nn.Module | None]
    _options: AttentionOptions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend `hidden_states` `[1, tokens, width]`."""
        x, cache = kwargs.get("hidden_states"), kwargs.get(CACHE_KEYWORD)
        rotary: Any = kwargs.get("position_embeddings")
        if (
            args
            or self.training
            or not isinstance(cache, HandlesOnly)
            or kwargs.get("attention_mask") is not None
            or not isinstance(x, Tensor)
            or not self._fits(x, rotary)
            or _has_any_global_hook()  # type: ignore[no-untyped-call]
            or (torch.is_grad_enabled() and x.requires_grad)
        ):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        query, key, value = self.project(x, rotary)
        key, _ = cache.update(key, value, self.layer_idx)  # type: ignore[attr-defined]
        out = handle_of(key).attend(query, self._options)  # type: ignore[union-attr]
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), None

    def _fits(self, x: Tensor, rotary: Any) -> bool:
        return (
            isinstance(rotary, tuple)
            and len(rotary) == 2
            and rotary[0].dtype == rotary[1].dtype == x.dtype
            and rotary[0].shape == rotary[1].shape == (*x.shape[:-1], self.head_dim)
            and all(packed_and_unwatched(self._modules.get(name), x.dtype) for name in _PARTS)
        )

    def project(self, x: Tensor, rotary: _Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values: each `[1, heads, tokens, head_dim]`."""
        return _project([self._modules[name] for name in _PARTS], x, rotary)


def _project(parts: list[Any], x: Tensor, rotary: _Rotary) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part._packing for part in parts)
    biases = [without_graph(part.bias) for part in parts]
    columns = [q.out_features, k.out_features, v.out_features]
    cos, sin = rotary
    states = torch.ops.paged_kv.qkv(x, q.packed, biases[0], k.packed, biases[1], v.packed, biases[2], cos, sin, columns)
    query, key, value = (state.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for state in states)
    return query, key, value


class _Probe:
    """A cache and its handle, which remember what a module gives them; the queries come back as what was attended."""

    query: Tensor
    options: AttentionOptions

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.key, self.value, self.layer = key, value, layer
        return tie(key, self), value

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def attend(self, query: Tensor, options: AttentionOptions) -> Tensor:
        self.query, self.options = query, options
        return query.transpose(1, 2)


def fuse_attention(module: nn.Module) -> FuseUndo | None:
    """Fuse an attention module that is switched to packed attention, if it computes what the kernel does, by trying.

    Models vary in norms of queries and keys, partial or interleaved rotation, clipping, layers without rotation, sinks
    and caps: all of them show in a trial with angles and positions near and far, and values small and large.
    """
    parts: list[Any] = [module._modules.get(name) for name in _PARTS]
    q, k, v = parts
    if isinstance(module, FusedAttention) or not isinstance(q, PackedLinear) or "forward" in module.__dict__:
        return None
    dtype, width = q._packing.packed.dtype, getattr(module, "head_dim", None)
    if not isinstance(width, int) or not all(packed_and_unwatched(part, dtype) for part in parts):
        return None
    if width % 2 or any(part.out_features % width for part in parts) or k.out_features != v.out_features:
        return None
    output, config = module._modules.get("o_proj"), getattr(module, "config", None)
    if output is None or config is None or attention_of(config) != PACKED_ATTENTION:
        return None
    random = torch.Generator().manual_seed(0)
    probe = _Probe()
    with torch.no_grad():
        x = torch.randn(1, 4, q.in_features, generator=random).to(dtype)
        x *= torch.tensor([0.01, 1, 30, 1000]).view(1, 4, 1).to(dtype) / q(x).abs().max()
        cos, sin = torch.randn(2, 1, 4, width, generator=random).to(dtype)
        try:
            out = type(module).forward(
                module,
                hidden_states=x,
                position_embeddings=(cos, sin),
                attention_mask=None,
                position_ids=torch.tensor([[0, 7, 40_000, 300_000]]),
                use_cache=True,
                **{CACHE_KEYWORD: probe},
            )
            same = _agrees(probe, module, out, _project(parts, x, (cos, sin)))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
            return None  # it takes or does something else
    return change(module, FusedAttention, "_options", probe.options) if same else None


def _agrees(probe: _Probe, module: Any, out: Any, fused: tuple[Tensor, ...]) -> bool:
    """Whether a module gave cache and attention what `fused` is, and made of the answer nothing but `o_proj` of it."""
    options, eps = probe.options, torch.finfo(fused[0].dtype).eps
    if (
        options.softcap is not None
        or options.sinks is not None
        or not options.causal
        or probe.layer != module.layer_idx
    ):
        return False
    for ours, theirs in zip(fused, (probe.query, probe.key, probe.value), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        # In halves each step is rounded, as there: the same bits. In fp32 products and sums may be fused.
        limit = 4 * eps * theirs.abs().amax((1, 3), keepdim=True) if ours.dtype == torch.float32 else 0
        if not ((ours - theirs).abs() <= limit).all():
            return False
    attended = module.o_proj(probe.query.transpose(1, 2).reshape(1, 4, -1))
    return isinstance(out, tuple) and len(out) == 2 and out[1] is None and torch.equal(out[0], attended)
