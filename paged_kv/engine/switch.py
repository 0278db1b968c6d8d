"""A model switched over to packed attention, and back as it was found.

Owns: which models are in use by an engine; attention, training mode and packed weights, and their undoing.
Does not know: how a step runs.
"""

from __future__ import annotations

import weakref
from typing import Any

from allocator import KVError
from paged_kv._compat import attention_of, text_config, why_not_packed
from paged_kv.attention.attach import PACKED_ATTENTION, register
from paged_kv.optimize import optimize_for_cpu


class UnsupportedByEngine(KVError):
    """Raised when a model cannot run packed. Do: read the reason; use the drop-in cache with `model.generate`."""


class ModelInUse(KVError):
    """Raised when a model already runs in an open engine. Do: close that one, or load the model a second time."""


#: Models that an open engine runs on.
_IN_USE: weakref.WeakSet[Any] = weakref.WeakSet()


class Switch:
    """Makes a model ready for packed steps; `undo` leaves it as it was."""

    def __init__(self, model: Any, *, optimize: bool = True) -> None:
        """Switch `model` over; everything is undone if that fails.

        Raises:
            UnsupportedByEngine: The model does not take its attention from transformers' registry.
            ModelInUse: An engine on the model is open.
        """
        name = type(model).__name__
        if reason := why_not_packed(text_config(model)):
            raise UnsupportedByEngine(f"{name} cannot run packed: {reason}")
        if model in _IN_USE:
            raise ModelInUse(f"this {name} runs in an open engine: close that LLM first, or load the model twice")
        if attention_of(model) == PACKED_ATTENTION:
            raise ModelInUse(
                f"this {name} is a copy of a model that runs in an open engine, or shares its config with one: "
                "close that LLM first, and copy after it"
            )
        self._model = model
        self._training = bool(model.training)
        self._attention = attention_of(model)
        self._optimized: Any = None
        self._undone = False
        _IN_USE.add(model)
        try:
            register()
            model.eval()
            model.set_attn_implementation(PACKED_ATTENTION)
            if attention_of(model) != PACKED_ATTENTION:
                raise UnsupportedByEngine(f"{name} does its own attention and cannot run packed")
            if optimize and model.device.type == "cpu":
                self._optimized = optimize_for_cpu(model)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Leave the model as it was found; a second call does nothing."""
        if self._undone:
            return
        self._undone = True
        if self._optimized is not None:
            self._optimized.undo()
            self._optimized = None
        if attention_of(self._model) != self._attention:
            self._model.set_attn_implementation(self._attention)
        self._model.train(self._training)
        _IN_USE.discard(self._model)
