"""The model as the engine uses it: one packed forward a step.

Owns: the cache object that carries a step's pages through the forward pass.
Does not know: requests, scheduling, sampling, how a model is switched over.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from allocator import KVError
from paged_kv._compat import CACHE_KEYWORD
from paged_kv.attention.base import AttentionOptions, Backend, tie
from paged_kv.attention.cpu.backend import write_pages
from paged_kv.engine.batch import Batch
from paged_kv.engine.switch import Switch
from paged_kv.forward import HandlesOnly
from paged_kv.memory import PagedMemory
from paged_kv.step import Step


class PackedCache(DynamicCache, HandlesOnly):
    """What the model takes for its cache: writes the step's keys and values into pages, keeps nothing itself."""

    def __init__(self, memory: PagedMemory, backend: Backend) -> None:
        """Write into `memory`, attend with `backend`."""
        super().__init__()
        self._memory = memory
        self._backend = backend
        self._windows = {layer: window for group in memory.groups for layer, window in _windows(group.spec)}
        self._fused = backend.name == "cpu"
        self.step: Step | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values `[1, kv_heads, tokens, width]` and hand on where its pages are."""
        if self.step is None:
            raise KVError("a packed cache belongs to a step of the engine and is empty outside of it")
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if self._fused:
            store = self._memory.place(layer_idx)[0].store
            write_pages(store.keys, store.values, keys, values, self.step.slots(layer_idx))
        else:
            self.step.write(layer_idx, keys, values)
        handle = PackedHandle(self._backend, self._memory, self.step, layer_idx, self._windows[layer_idx])
        return tie(key_states, handle), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is before the packed tokens: positions are given."""
        return 0


class PackedHandle:
    """What the attention function finds on the key: one layer's pages in this step."""

    __slots__ = ("_backend", "_layer", "_memory", "_step", "_window")

    def __init__(self, backend: Backend, memory: PagedMemory, step: Step, layer: int, window: int | None) -> None:
        self._backend = backend
        self._memory = memory
        self._step = step
        self._layer = layer
        self._window = window

    def attend(self, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend packed queries `[1, q_heads, tokens, key_width]`; returns `[1, tokens, q_heads, value_width]`."""
        packed = query[0].transpose(0, 1)
        if self._memory.queries is not None:
            self._memory.note_queries(self._step, self._layer, packed, options.scale)
        view = self._step.view(self._layer, self._window)
        return self._backend.attend(packed, view, options).unsqueeze(0)


class Runner:
    """A model switched over to packed attention, until `close`."""

    def __init__(self, model: Any, memory: PagedMemory, backend: Backend, *, optimize: bool = True) -> None:
        """Switch `model` over.

        Raises:
            UnsupportedByEngine: The model does not take its attention from transformers' registry.
            ModelInUse: Another engine runs on it.
        """
        self._model = model
        self._cache = PackedCache(memory, backend)
        self.device: torch.device = memory.groups[0].spec.device
        # A runner that is dropped without `close` gives its model back as well, but not at the end of the process.
        self._give_back = weakref.finalize(self, Switch(model, optimize=optimize).undo)
        self._give_back.atexit = False

    @torch.inference_mode()
    def forward(self, batch: Batch, step: Step) -> Tensor:
        """One pass over a step's tokens; returns the logits asked for, `[lines, vocab]`."""
        self._cache.step = step
        try:
            result = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=True,
                logits_to_keep=batch.logits_index,
                **{CACHE_KEYWORD: self._cache},
            )
        finally:
            self._cache.step = None
        logits: Tensor = result.logits[0]
        return logits

    def close(self) -> None:
        """Leave the model as it was found."""
        self._give_back()


def _windows(spec: Any) -> list[tuple[int, int | None]]:
    return list(zip(spec.layers, spec.windows, strict=True))
