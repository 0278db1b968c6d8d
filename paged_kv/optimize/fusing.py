"""Modules of several small operations that become one, where a trial shows that they compute what the operation does.

Owns: RMS norms and gated blocks (`down(silu(gate(x)) * up(x))`), how they are recognised, their undoing.
Does not know: how weights are packed, which modules of a model are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.modules.module import _has_any_global_hook

from paged_kv.attention.cpu import build
from paged_kv.optimize.packing import PackedLinear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class FuseUndo:
    """The class that a fused module had, and what it got besides another one."""

    module: Any
    cls: type
    attribute: str

    def undo(self) -> None:
        """Put it back."""
        del self.module.__dict__[self.attribute]
        self.module.__class__ = self.cls


_CLASSES: dict[tuple[type, type], type] = {}


def change(module: Any, mixin: type, attribute: str, value: Any) -> FuseUndo:
    """Mix `mixin` into the class of a module and give it an attribute."""
    cls = type(module)
    if (mixin, cls) not in _CLASSES:
        _CLASSES[mixin, cls] = type(f"Fused{cls.__name__}", (mixin, cls), {})
    module.__dict__[attribute] = value
    module.__class__ = _CLASSES[mixin, cls]
    return FuseUndo(module, cls, attribute)


# -- norms -------------------------------------------------------------------------------------------------------------


class FusedNorm:
    """What a root-mean-square norm does when it is one pass over memory; mixed into the class that it had."""

    weight: Tensor
    _eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `[..., width]`."""
        weight = self.weight
        if hidden_states.dtype != weight.dtype or (torch.is_grad_enabled() and hidden_states.requires_grad):
            plain: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return plain
        out: Tensor = torch.ops.paged_kv.rms_norm(
            hidden_states, weight.detach() if torch.is_grad_enabled() else weight, self._eps
        )
        return out


def fuse_norm(module: nn.Module) -> FuseUndo | None:
    """Fuse a module that is called a norm if it computes what the kernel does, by trying; models have variants."""
    cls, weight = type(module), module._parameters.get("weight")
    if issubclass(cls, FusedNorm):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not cls.__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None or weight.dim() != 1:
        return None
    if weight.device.type != "cpu" or list(module._parameters) != ["weight"] or build.why_not() is not None:
        return None
    if weight.dtype not in _DTYPES:
        return None
    trial = torch.linspace(-3, 4, 2 * weight.numel(), dtype=torch.float64).to(weight.dtype).view(2, -1)
    with torch.no_grad():
        plain = cls.forward(module, trial)
        fused = torch.ops.paged_kv.rms_norm(trial, weight.detach(), eps)
    if plain.dtype != fused.dtype or not torch.allclose(
        plain, fused, rtol=8 * torch.finfo(weight.dtype).eps, atol=1e-30
    ):
        return None
    return change(module, FusedNorm, "_eps", eps)


# -- gated blocks ------------------------------------------------------------------------------------------------------

_PARTS = ("gate_proj", "up_proj", "down_proj")


class FusedMLP:
    """What a gated block does when it is two passes over its weights; mixed into the class that it had.

    Its parts stay modules of their own. It calls them one by one, as before, where that could make a difference: while
    one of them has hooks or a forward of its own, or was replaced, in training, and for inputs that need gradients.
    """

    training: bool
    _modules: dict[str, nn.Module | None]
    _activation: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Transform `[..., width]`."""
        gate, up, down = parts = [self._modules.get(name) for name in _PARTS]
        x = args[0] if len(args) == 1 and not kwargs else None
        if (
            not isinstance(x, Tensor)
            or self.training
            or self._modules.get("act_fn") is not self._activation
            or not all(packed_and_unwatched(part, x.dtype) for part in parts)
            or not unwatched(self._activation)
            or _has_any_global_hook()  # type: ignore[no-untyped-call]
            or (torch.is_grad_enabled() and x.requires_grad)
        ):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return _mlp(x, gate, up, down)


def unwatched(part: nn.Module) -> bool:
    """Whether calling a module is nothing more than the forward of its class."""
    hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    return not hooks and "forward" not in part.__dict__


def packed_and_unwatched(part: nn.Module | None, dtype: torch.dtype) -> bool:
    """Whether a part is a layer that the kernel packed, of this dtype, and nothing more."""
    return (
        type(part) is PackedLinear
        and part._packing.method == "kernel"
        and part._packing.packed.dtype == dtype
        and unwatched(part)
    )


def _mlp(x: Tensor, gate: Any, up: Any, down: Any) -> Tensor:
    out: Tensor = torch.ops.paged_kv.mlp(
        x,
        gate._packing.packed,
        without_graph(gate.bias),
        up._packing.packed,
        without_graph(up.bias),
        down._packing.packed,
        without_graph(down.bias),
        down._packing.out_features,
    )
    return out


def without_graph(bias: Tensor | None) -> Tensor | None:
    """A bias for an operation that computes no gradients."""
    return bias.detach() if bias is not None and torch.is_grad_enabled() else bias


def fuse_mlp(module: nn.Module) -> FuseUndo | None:
    """Fuse a module of three packed layers and SiLU if it computes what the kernel does, by trying."""
    cls, activation = type(module), module._modules.get("act_fn")
    gate, up, down = parts = [module._modules.get(name) for name in _PARTS]
    if (
        issubclass(cls, FusedMLP)
        or activation is None
        or "forward" in module.__dict__
        or list(module.parameters(False))
    ):
        return None
    dtype = gate._packing.packed.dtype if isinstance(gate, PackedLinear) else torch.float32
    if not all(packed_and_unwatched(part, dtype) for part in parts):
        return None
    assert isinstance(gate, PackedLinear)
    assert isinstance(down, PackedLinear)
    with torch.no_grad():
        trial = torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
        trial *= 8 / gate(trial).abs().max()  # gates large enough to tell activations from each other
        curve = torch.linspace(-10, 10, 500).to(dtype)
        eps = torch.finfo(dtype).eps
        if not torch.allclose(activation(curve), silu(curve), rtol=4 * eps, atol=eps * 1e-3):
            return None
        try:
            plain = cls.forward(module, trial)
        except TypeError:  # it takes more than a tensor
            return None
        if not isinstance(plain, Tensor) or plain.shape != (3, down.out_features) or plain.dtype != dtype:
            return None
        error, size = (plain.float() - _mlp(trial, gate, up, down).float()).abs(), plain.float().abs().max()
    # An activation may be rounded the other way now and then; a block that computes something else is further off.
    if not (error.max() <= 2 * eps * size and error.mean() <= max(eps / 16, 1.2e-7) * size):
        return None
    return change(module, FusedMLP, "_activation", activation)
