"""Linear layers whose weights are packed once for this processor.

Owns: how a weight is packed and which way is best here, the packed layers, their undoing.
Does not know: which layers of a model are packed, what is fused of them.

A packed weight is stored once, in packed form, and read as `layer.weight` it is unpacked anew each time; `state_dict`
has it as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paged_kv.attention.cpu import build

Method = Literal["onednn", "kernel"]


def best_method(dtype: torch.dtype) -> Method | None:
    """How linear layers of a dtype are packed on this processor, or None if torch's own are best left alone.

    The kernel of this package is the fastest measured for few rows everywhere. For hundreds of rows oneDNN's packed
    product is ahead with AVX-512: a little in fp32, and far in bf16 where there is AMX, which the kernel does not use
    (docs/attention.md has the figures).
    """
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if wide and _onednn_takes(dtype) and (dtype == torch.float32 or torch.cpu._is_amx_tile_supported()):
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


class Packing:
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

    _packing: Packing
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


def packed_class(cls: type) -> type | None:
    """The packed class for `nn.Linear` and for transformers' `Conv1D` (GPT-2: a linear layer with W^T), else None."""
    if cls not in _PACKED_CLASSES and cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        _PACKED_CLASSES[cls] = type("PackedConv1D", (_Packed, cls), {"_transposed": True})
    return _PACKED_CLASSES.get(cls)


def pack(module: nn.Module, cls: type, method: Method, *, owned: bool) -> PackUndo:
    """Turn a layer into its packed class `cls`; `owned`: no other module uses its weight, which is then held once."""
    parameter = module._parameters["weight"]
    assert parameter is not None
    transposed: bool = cls._transposed  # type: ignore[attr-defined]
    packing = Packing(parameter.t() if transposed else parameter, method)
    change = PackUndo(module, type(module), parameter, owned)
    del module._parameters["weight"]
    module.__dict__["_packing"] = packing
    module.__class__ = cls
    if owned:
        parameter.data = parameter.data.new_empty(0)
    return change


@dataclass(frozen=True, slots=True)
class PackUndo:
    """How a layer was before it was packed: its class, its parameter, and whether nobody else uses that."""

    module: Any
    cls: type
    parameter: nn.Parameter
    owned: bool

    def undo(self) -> None:
        """Put it back: the same parameter object with the same bits."""
        if self.owned:
            self.parameter.data = self.module.weight.contiguous()
        del self.module.__dict__["_packing"]
        self.module.__class__ = self.cls
        self.module._parameters["weight"] = self.parameter
        _weight_first(self.module)


def _weight_first(module: Any) -> None:
    """Parameters in the order in which the layer registered them: it shows in state_dict."""
    bias = module._parameters.pop("bias", None)
    module._parameters["bias"] = bias
