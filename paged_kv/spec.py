"""The shape of a model's KV cache: one `KVSpec` per group of layers that can share a pool.

Owns: reading a transformers config (or model), bytes per page, pages for a byte budget.
Does not know: page ids, sequences, tensors of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from allocator import KVError
from paged_kv._compat import layer_config, layer_windows, text_config

Lanes = Literal["layer", "head"]

#: KV heads, key width, value width, element type and place of a layer.
Shape = tuple[int, int, int, torch.dtype, torch.device]


class UnsupportedModel(KVError):
    """Raised when a model's layers cannot be paged. Do: read the reason; use `DynamicCache` for this model."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Layers of one KV shape. They share one pool: a page freed by one is usable by any other.

    Attributes:
        layers: Model layer indices of the group, ascending.
        num_kv_heads: KV heads of each layer.
        key_width: Elements of one head's key.
        value_width: Elements of one head's value; differs from `key_width` for MLA models.
        dtype: Element type of the pages.
        device: Where the pages live.
        windows: Sliding window of each layer in tokens (the query's own token included), None for full attention.
        page_size: Slots (tokens) of a page.
        lanes: Page tables a layer has: 1, or one per KV head.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...]
    page_size: int = 16
    lanes: int = 1

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_width", "value_width", "page_size", "lanes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.layers:
            raise ValueError("a KVSpec needs at least one layer")
        if len(self.windows) != len(self.layers):
            raise ValueError(f"windows must name each of the {len(self.layers)} layers, got {len(self.windows)}")
        if self.num_kv_heads % self.lanes:
            raise ValueError(f"lanes must divide the {self.num_kv_heads} KV heads, got {self.lanes}")

    @property
    def heads_per_lane(self) -> int:
        """KV heads whose tokens lie in one page."""
        return self.num_kv_heads // self.lanes

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, K and V together."""
        return self.page_size * self.heads_per_lane * (self.key_width + self.value_width) * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers of the group, without rounding to pages."""
        width = self.key_width + self.value_width
        return len(self.layers) * self.num_kv_heads * width * self.dtype.itemsize

    @classmethod
    def from_model(
        cls,
        model_or_config: Any,
        *,
        page_size: int = 16,
        lanes: Lanes = "layer",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[KVSpec, ...]:
        """Read the KV shapes of a transformers model or config, one spec per group of equal layers.

        Args:
            model_or_config: A `PreTrainedModel`, or its config.
            page_size: Tokens per page.
            lanes: "layer" for one page table a layer, "head" for one per KV head.
            dtype: Element type; the model's own by default.
            device: Where the pages go; the model's own by default.

        Raises:
            UnsupportedModel: The config lacks what is needed (the message names the missing field).
        """
        if lanes not in ("layer", "head"):
            raise ValueError(f'lanes must be "layer" or "head", got {lanes!r}')
        config = text_config(model_or_config)
        dtype = dtype or getattr(model_or_config, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        device = torch.device(device or getattr(model_or_config, "device", None) or "cpu")
        windows = layer_windows(config)
        shapes = {}
        for layer in windows:
            own = layer_config(config, layer)
            shapes[layer] = (_heads(own), _head_width(own), _head_width(own), dtype, device)
        return _grouped(shapes, windows, page_size, lanes)


def learn_specs(
    states: Mapping[int, tuple[Tensor, Tensor]],
    windows: Mapping[int, int | None],
    *,
    page_size: int,
    lanes: Lanes,
) -> tuple[KVSpec, ...]:
    """Group layers by the K and V `[rows, kv_heads, tokens, width]` that a first forward brought for each."""
    shapes = {layer: shape_of(keys, values) for layer, (keys, values) in sorted(states.items())}
    return _grouped(shapes, windows, page_size, lanes)


def shape_of(keys: Tensor, values: Tensor) -> Shape:
    """What pages must be like to hold K and V `[rows, kv_heads, tokens, width]`; under autocast their types differ."""
    dtype = torch.promote_types(keys.dtype, values.dtype)
    return keys.shape[1], keys.shape[3], values.shape[3], dtype, keys.device


def _grouped(
    shapes: Mapping[int, Shape], windows: Mapping[int, int | None], page_size: int, lanes: Lanes
) -> tuple[KVSpec, ...]:
    """One spec per shape, in the order of their first layers."""
    groups: dict[Shape, list[int]] = {}
    for layer, shape in shapes.items():
        groups.setdefault(shape, []).append(layer)
    return tuple(
        KVSpec(
            layers=tuple(layers),
            num_kv_heads=heads,
            key_width=key_width,
            value_width=value_width,
            dtype=dtype,
            device=device,
            windows=tuple(windows[layer] for layer in layers),
            page_size=page_size,
            lanes=heads if lanes == "head" else 1,
        )
        for (heads, key_width, value_width, dtype, device), layers in groups.items()
    )


def _first(config: Any, names: Iterable[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _heads(config: Any) -> int:
    heads = _first(config, ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"))
    if heads is None:
        raise UnsupportedModel(f"{type(config).__name__} names no number of attention heads")
    return heads


def _head_width(config: Any) -> int:
    if width := _first(config, ("head_dim",)):
        return width
    hidden = _first(config, ("hidden_size", "n_embd", "d_model"))
    heads = _first(config, ("num_attention_heads", "n_head", "num_heads"))
    if hidden is None or heads is None:
        raise UnsupportedModel(f"{type(config).__name__} names no hidden size or number of heads")
    return hidden // heads


def available_bytes(device: torch.device) -> int:
    """Bytes free on a device now: psutil's available memory on the CPU, the driver's figure on CUDA."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
