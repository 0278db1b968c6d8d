"""Faster layers on the CPU, for inference: linear weights packed once, small operations fused, all undone exactly.

Owns: which layers of a model are changed, and the handle that puts them back.
Does not know: caches, attention, engines.

A changed layer is the same module with another class, so hooks, names and references to it stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from paged_kv.optimize.attending import FusedAttention, fuse_attention
from paged_kv.optimize.fusing import FusedMLP, FusedNorm, fuse_mlp, fuse_norm
from paged_kv.optimize.packing import Method, PackedLinear, PackUndo, best_method, pack, packed_class

__all__ = [
    "FusedAttention",
    "FusedMLP",
    "FusedNorm",
    "Method",
    "Optimized",
    "PackedLinear",
    "best_method",
    "optimize_for_cpu",
]

_SMALLEST = 4096  # weights of a layer: below, calling costs more than the product


class _Change(Protocol):
    def undo(self) -> None: ...


class Optimized:
    """What `optimize_for_cpu` changed in a model.

    Attributes:
        num_packed: Layers whose weight is packed.
        num_fused: Norms, gated blocks and attention modules of which several operations are one.
        method: How weights are packed, None if none is.
    """

    def __init__(self, changes: list[_Change], method: Method | None) -> None:
        self._changes = changes
        self.num_packed = sum(isinstance(change, PackUndo) for change in changes)
        self.num_fused = len(changes) - self.num_packed
        self.method = method

    def undo(self) -> None:
        """Put every layer back: the same parameter objects with the same bits. A second call does nothing."""
        while self._changes:
            self._changes.pop().undo()


def optimize_for_cpu(model: nn.Module, *, method: Method | None = None) -> Optimized:
    """Pack the weights of a model's linear layers for this processor, fuse small operations; for inference.

    No weight is held twice, except one that another module uses as well (a tied embedding): that stays, and the linear
    layer gets a packed copy. Layers that are not on the CPU, not exactly `nn.Linear` or `Conv1D`, or small, stay as
    they are. Inputs that need gradients take the ordinary way, with an unpacked weight; so does a gated block
    whose parts somebody watches with hooks.

    Args:
        model: Changed in place; call `undo()` on the result to get it back as it was.
        method: "onednn" or "kernel"; by default what is best for each dtype here, which may be nothing.

    Returns:
        What was changed.
    """
    uses = _count_uses(model)
    changes: list[_Change] = []
    used: Method | None = None
    choose: Callable[[torch.dtype], Method | None] = best_method if method is None else lambda dtype: method
    chosen: dict[torch.dtype, Method | None] = {}
    for module in model.modules():
        cls = packed_class(type(module))
        weight = module._parameters.get("weight")
        if cls is None or weight is None or weight.device.type != "cpu" or weight.numel() < _SMALLEST:
            continue
        if weight.dtype not in chosen:
            chosen[weight.dtype] = choose(weight.dtype)
        way = chosen[weight.dtype]
        if way is None:
            continue
        changes.append(pack(module, cls, way, owned=uses[_storage(weight)] == 1))
        used = way
    for module in model.modules():
        if fused := fuse_norm(module) or fuse_mlp(module) or fuse_attention(module):
            changes.append(fused)
    return Optimized(changes, used)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _count_uses(model: nn.Module) -> dict[int, int]:
    """How many parameters and buffers of how many modules live in each storage."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                uses[_storage(tensor)] = uses.get(_storage(tensor), 0) + 1
    return uses
