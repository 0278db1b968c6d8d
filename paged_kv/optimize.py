"""Faster layers on the CPU, for inference: linear weights packed once, norms in one pass, all undone exactly.

Owns: which layers are changed and how, the changed modules, their undoing.
Does not know: caches, attention, engines.

A changed layer is the same module with another class, so hooks, names and references to it stay. A packed weight is
stored once, in packed form, and read as `layer.weight` it is unpacked anew each time; `state_dict` has it as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paged_kv.attention.cpu import build

Method = Literal["onednn", "kernel"]
_SMALLEST = 4096  # weights of a layer: below, calling costs more than the product


def best_method(dtype: torch.dtype) -> Method | None:
    """How linear layers of a dtype are packed on this processor, or None if torch's own are best left alone.

    With AVX-512 oneDNN's packed product is the fastest measured (fp32 512 GFLOP/s on two cores against MKL's 180). On
    AVX2 it refuses bf16, and the kernel of this package is faster in fp32 too (docs/attention.md has the figures).
    """
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512") and _onednn_takes(dtype):
        return "onednn"
    if dtype in (torch.float32, torch.bfloat16, torch.float16) and build.why_not() is None:
        return "kernel"
    return "onednn" if _onednn_takes(dtype) else None


def _onednn_takes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class _Packing:
    """One packed weight, `[out_features, in_features]` before it was packed."""

    def __init__(self, weight: Tensor, method: Method) -> None:
        self.method = method
        self.out_features = weight.shape[0]
        if method == "onednn":
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        else:
            self.packed = torch.ops.paged_kv.pack_linear(weight.detach())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` `[..., in_features]` times the weight, plus the bias."""
        if self.method == "onednn":
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        else:
            out = torch.ops.paged_kv.linear(x, self.packed, bias, self.out_features)
        return out

    def unpack(self) -> Tensor:
        """The weight as it was, bit by bit."""
        if self.method == "onednn":
            weight: Tensor = self.packed.to_dense()
        else:
            weight = torch.ops.paged_kv.unpack_linear(self.packed, self.out_features)
        return weight


class _Packed:
    """What a packed layer does; mixed into the class that it had."""

    _packing: _Packing
    _transposed = False
    bias: Any

    @property
    def weight(self) -> Tensor:
        """The weight, unpacked anew; writing to it changes nothing."""
        weight = self._packing.unpack()
        return weight.t() if self._transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        packing = self._packing
        if x.dtype != packing.packed.dtype or (torch.is_grad_enabled() and x.requires_grad):
            return linear(x, packing.unpack(), self.bias)
        return packing.multiply(x, self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]  # the weight became read-only
    """`nn.Linear` with a packed weight."""


_PACKED_CLASSES: dict[type, type] = {nn.Linear: PackedLinear}


def _packed_class(cls: type) -> type | None:
    """The packed class for `nn.Linear` and for transformers' `Conv1D` (GPT-2: a linear layer with W^T), else None."""
    if cls not in _PACKED_CLASSES and cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        _PACKED_CLASSES[cls] = type("PackedConv1D", (_Packed, cls), {"_transposed": True})
    return _PACKED_CLASSES.get(cls)


class _FusedNorm:
    """What a root-mean-square norm does when it is one pass over memory; mixed into the class that it had."""

    weight: Tensor
    _eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype != weight.dtype or (torch.is_grad_enabled() and hidden_states.requires_grad):
            plain: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return plain
        out: Tensor = torch.ops.paged_kv.rms_norm(
            hidden_states, weight.detach() if torch.is_grad_enabled() else weight, self._eps
        )
        return out


_NORM_CLASSES: dict[type, type] = {}


def _fuse_norm(module: nn.Module) -> _Undo | None:
    """Fuse a module that is called a norm if it computes what the kernel does, by trying; models have variants."""
    cls, weight = type(module), module._parameters.get("weight")
    if issubclass(cls, _FusedNorm):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not cls.__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None or weight.dim() != 1:
        return None
    if weight.device.type != "cpu" or list(module._parameters) != ["weight"] or build.why_not() is not None:
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    trial = torch.linspace(-3, 4, 2 * weight.numel(), dtype=torch.float64).to(weight.dtype).view(2, -1)
    with torch.no_grad():
        plain = cls.forward(module, trial)
        fused = torch.ops.paged_kv.rms_norm(trial, weight.detach(), eps)
    if plain.dtype != fused.dtype or not torch.allclose(
        plain, fused, rtol=8 * torch.finfo(weight.dtype).eps, atol=1e-30
    ):
        return None
    if cls not in _NORM_CLASSES:
        _NORM_CLASSES[cls] = type(f"Fused{cls.__name__}", (_FusedNorm, cls), {})
    module.__dict__["_eps"] = eps
    module.__class__ = _NORM_CLASSES[cls]
    return _Undo(module, cls)


@dataclass(frozen=True, slots=True)
class _Undo:
    """How a module was: its class, and for a packed layer its parameter and whether nobody else uses that."""

    module: Any
    cls: type
    parameter: nn.Parameter | None = None
    owned: bool = False


class Optimized:
    """What `optimize_for_cpu` changed in a model.

    Attributes:
        num_packed: Layers whose weight is packed.
        num_fused: Norms that are one pass.
        method: How weights are packed, None if none is.
    """

    def __init__(self, changes: list[_Undo], method: Method | None) -> None:
        self._changes = changes
        self.num_packed = sum(change.parameter is not None for change in changes)
        self.num_fused = len(changes) - self.num_packed
        self.method = method

    def undo(self) -> None:
        """Put every layer back: the same parameter objects with the same bits. A second call does nothing."""
        while self._changes:
            change = self._changes.pop()
            if change.parameter is None:
                del change.module.__dict__["_eps"]
                change.module.__class__ = change.cls
                continue
            if change.owned:
                change.parameter.data = change.module.weight.contiguous()
            del change.module.__dict__["_packing"]
            change.module.__class__ = change.cls
            change.module._parameters["weight"] = change.parameter
            _weight_first(change.module)


def _weight_first(module: Any) -> None:
    """Parameters in the order in which the layer registered them: it shows in state_dict."""
    bias = module._parameters.pop("bias", None)
    module._parameters["bias"] = bias


def optimize_for_cpu(model: nn.Module, *, method: Method | None = None) -> Optimized:
    """Pack the weights of a model's linear layers for this processor, and fuse its RMS norms; for inference.

    No weight is held twice, except one that another module uses as well (a tied embedding): that stays, and the linear
    layer gets a packed copy. Layers that are not on the CPU, not exactly `nn.Linear` or `Conv1D`, or small, stay as
    they are. Inputs that need gradients take the ordinary way, with an unpacked weight.

    Args:
        model: Changed in place; call `undo()` on the result to get it back as it was.
        method: "onednn" or "kernel"; by default what is best for each dtype here, which may be nothing.

    Returns:
        What was changed.
    """
    uses = _count_uses(model)
    changes: list[_Undo] = []
    used: Method | None = None
    choose: Callable[[torch.dtype], Method | None] = best_method if method is None else lambda dtype: method
    chosen: dict[torch.dtype, Method | None] = {}
    for module in model.modules():
        if norm := _fuse_norm(module):
            changes.append(norm)
        cls = _packed_class(type(module))
        weight = module._parameters.get("weight")
        if cls is None or weight is None or weight.device.type != "cpu" or weight.numel() < _SMALLEST:
            continue
        if weight.dtype not in chosen:
            chosen[weight.dtype] = choose(weight.dtype)
        way = chosen[weight.dtype]
        if way is None:
            continue
        changes.append(_pack(module, cls, way, owned=uses[_storage(weight)] == 1))
        used = way
    return Optimized(changes, used)


def _pack(module: nn.Module, cls: type, method: Method, *, owned: bool) -> _Undo:
    parameter = module._parameters["weight"]
    assert parameter is not None
    transposed: bool = cls._transposed  # type: ignore[attr-defined]
    packing = _Packing(parameter.t() if transposed else parameter, method)
    change = _Undo(module, type(module), parameter, owned)
    del module._parameters["weight"]
    module.__dict__["_packing"] = packing
    module.__class__ = cls
    if owned:
        parameter.data = parameter.data.new_empty(0)
    return change


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
