"""kvpress's presses on a `PagedCache`: what their hooks expect, and what becomes of what they leave behind.

A press hangs forward hooks on a model's attention modules, crops `cache.layers[i]` there, or leaves in
`module.masked_key_indices` which pairs single heads should forget. `PagedCache.for_model` puts two hooks on the model's
decoder, which do nothing until a forward brings a paged cache and finds a press. For that forward alone,

- each hook of the press is told the cache and the columns, whatever names the installed transformers uses;
- pairs that heads should forget are really dropped, and their pages freed; marks of other caches are put aside;
- a forward that the press runs for itself is rolled back, so that it is not counted as tokens seen;
- keys that a press turned to positions from zero are turned on to where the sequence is.

What a press does when its block ends (FastKVzip, KVzip, KVCompose) is followed when the cache is next looked at. Plain
caches on the same model are left to kvpress, unless `bridge` asks for more.

Owns: these hooks and their removal.
Does not know: any press's method, kvpress's own patches (pages are never masked).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from paged_kv.cache import PagedCache
from paged_kv.compression import presses
from paged_kv.compression.apply import cache_in
from paged_kv.compression.errors import UnsupportedMethod
from paged_kv.compression.press_effects import forget, newest_column, turn_on
from paged_kv.compression.press_view import CacheOfPress
from paged_kv.compression.rotary import Rotary
from paged_kv.forward import ATTACHMENTS, Attachment, uncompiled

MASK = "masked_key_indices"
_ABSENT = object()


@dataclass(slots=True)
class _Run:
    """One forward with a press on it.

    Attributes:
        cache: The paged cache of the forward; None if `bridge` serves a plain one.
        hooked: Presses with hooks on attention modules.
        presses: These, and the one that put its own `forward` in the decoder's place.
        seen: Tokens seen before.
        wanted: Tokens that will have been seen afterwards: what the press fed for itself is not among them.
        marks: What is masked on each module for the sake of other caches.
        handles: Hooks of this forward.
    """

    cache: PagedCache | None
    hooked: list[Any]
    presses: list[Any]
    seen: int = 0
    wanted: int = 0
    marks: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Aftermath:
    """A forward that is over, whose press may still do something when its block ends; as in `_Run`.

    `wanted` is None where nothing is to be taken back.
    """

    cache: ReferenceType[PagedCache]
    presses: list[Any]
    wanted: int | None
    marks: list[Any]


class Watch:
    """The hooks on one model's decoder, from `__init__` to `remove`."""

    def __init__(self, decoder: Any) -> None:
        """Watch the forwards of `decoder`, a model with `layers` of which some have a `self_attn`."""
        self._decoder = decoder
        self._attentions = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
        # Layers whose heads forgot different tokens: the press goes on counting columns in them.
        self._in_columns: WeakKeyDictionary[PagedCache, set[int]] = WeakKeyDictionary()
        self._run: _Run | None = None
        self._last: _Aftermath | None = None
        self._is_known = False
        #: Set once a cache was made for the model: then the hooks stay until `detach`.
        self.stays = False
        #: What `bridge` serves now.
        self.bridges: list[Bridge] = []
        self._handles = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    @classmethod
    def on(cls, model: Any) -> Watch | None:
        """The watch of a model, None if there is none."""
        hooks = () if (decoder := _decoder_of(model)) is None else decoder._forward_pre_hooks.values()
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def __getstate__(self) -> dict[str, Any]:
        # A model may be copied or saved with its hooks; caches and the forward under way stay behind.
        return {name: vars(self)[name] for name in ("_decoder", "_attentions", "_handles", "_is_known", "stays")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _in_columns=WeakKeyDictionary(), _run=None, _last=None, bridges=[])

    def remove(self) -> None:
        """Leave the model as it was found."""
        self.settle()
        self._forget_last()
        self._stop()
        for handle in self._handles:
            handle.remove()

    # -- a forward ---------------------------------------------------------------------------------------------------

    @uncompiled
    def _before(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Look for a press; with one, get ready for what it reads and leaves."""
        self._stop()
        self.settle()
        cache = cache_in(kwargs)
        hooked = presses.behind(hook for module in self._attentions for hook in module._forward_hooks.values())
        found = hooked + presses.behind([vars(decoder).get("forward")])
        self._go_on(cache, found)
        if not found or (cache is None and not self.bridges):
            return None
        if cache is not None:
            self._require_known(found)
        run = self._run = _Run(cache, hooked, found)
        run.handles = [m.register_forward_hook(self._tell, with_kwargs=True, prepend=True) for m in self._attentions]
        if cache is not None:
            self._prepare(run, cache, args, kwargs)
        if "forward" in vars(decoder) and "cache" in kwargs:
            # A press that put its own `forward` in place takes the cache by its old name.
            kwargs = {**kwargs, "past_key_values": kwargs["cache"]}
            del kwargs["cache"]
        return args, kwargs

    def _prepare(self, run: _Run, cache: PagedCache, args: Any, kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        num_given = 0 if given is None else int(given.shape[1])
        # KVzip and its kin hang hooks for replays of the prompt alone.
        is_replay = any(presses.is_kind(press, "KVzipPress") for press in run.hooked)
        run.seen = cache.get_seq_length()
        run.wanted = run.seen + (0 if is_replay else num_given)
        if self._in_columns.get(cache):
            cache.memory.record_queries(max(1, num_given))
        # What is masked there now belongs to another cache, a plain one.
        run.marks = [vars(module).get(MASK, _ABSENT) for module in self._attentions]
        for module in self._attentions:
            setattr(module, MASK, None)

    def _require_known(self, found: Sequence[Any]) -> None:
        """Refuse a press that cannot work on pages, and a release of kvpress that is not tested."""
        presses.require_pageable(found)
        if not self._is_known and not any(bridge.untested for bridge in self.bridges):
            presses.require_tested()
            self._is_known = True

    def _tell(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Add to the arguments that the press's hook is about to read; the forward they came from is over."""
        cache = kwargs["past_key_values"] if kwargs.get("past_key_values") is not None else kwargs.get("cache")
        if cache is None:
            return
        if "hidden_states" not in kwargs:
            raise UnsupportedMethod(
                f"presses read the hidden states that attention is given by name, and {type(module).__name__} is given "
                "none: this model cannot be pressed"
            )
        if isinstance(cache, PagedCache):
            num_new = kwargs["hidden_states"].shape[1]
            kwargs["past_key_values"] = CacheOfPress(cache, self._in_columns.get(cache, set()), num_new)
            seen = cache.get_seq_length()
            kwargs["cache_position"] = torch.arange(seen - num_new, seen)
            return
        kwargs["past_key_values"] = cache
        if kwargs.get("cache_position") is None:
            kwargs["cache_position"] = kwargs["position_ids"][0]

    @uncompiled
    def _after(self, decoder: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Turn what the press left on the modules into crops, and take back what it fed for itself."""
        run = self._run
        if run is None:
            return
        cache, marks = run.cache, self._taken(run.marks)
        self._stop()
        if cache is None or output is None:  # a plain cache, or the forward failed
            return
        self._last = _Aftermath(ref(cache), run.presses, run.wanted, run.marks)
        self._drop(cache, marks)
        _roll_back(cache, run.wanted)
        if run.seen == 0 and any(map(presses.rerotates, run.hooked)):
            turn_on(cache, Rotary.of(self._decoder))
        cache._unsettled = self._follow

    def _stop(self) -> None:
        """End the forward under way, if there is one: its hooks go, and marks of other caches come back."""
        run, self._run = self._run, None
        if run is None:
            return
        for handle in run.handles:
            handle.remove()
        self._taken(run.marks)

    # -- after it ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Follow at once what a press did when its block ended, to the cache of its last forward."""
        last = self._last
        if last is None or self._run is not None:
            return
        cache = last.cache()
        if cache is None or cache._unsettled is None:  # nobody holds it any more, or it was reset
            self._taken(last.marks)
        else:
            cache._catch_up()

    def _follow(self) -> None:
        last = self._last
        cache = None if last is None else last.cache()
        if last is None or cache is None:
            return
        self._drop(cache, self._taken(last.marks))
        if last.wanted is not None:
            _roll_back(cache, last.wanted)

    def _go_on(self, cache: PagedCache | None, found: Sequence[Any]) -> None:
        """Wait for no more of the last press, unless it is at work on the same cache without hooks."""
        last = self._last
        if last is None:
            return
        is_at_work = cache is not None and any(getattr(press, "_cache", None) is cache for press in last.presses)
        if is_at_work and not found and cache is last.cache():
            self._last = _Aftermath(last.cache, last.presses, None, last.marks)
        else:
            self._forget_last()

    def _forget_last(self) -> None:
        last, self._last = self._last, None
        cache = None if last is None else last.cache()
        if cache is not None:
            cache._unsettled = None

    def _taken(self, before: Sequence[Any]) -> dict[int, Sequence[Tensor]]:
        """Take off what was marked since: layer index to the pairs; what was marked before comes back."""
        found = {}
        for module, old in zip(self._attentions, before, strict=False):
            new = vars(module).get(MASK, _ABSENT)
            if new is old:
                continue
            if new is not None and new is not _ABSENT:
                found[module.layer_idx] = new
            if old is _ABSENT:
                delattr(module, MASK)
            else:
                setattr(module, MASK, old)
        return found

    def _drop(self, cache: PagedCache, marks: dict[int, Sequence[Tensor]]) -> None:
        for layer, masked in marks.items():
            columns = self._in_columns.setdefault(cache, set())
            forget(cache, layer, masked, in_columns=layer in columns)
            columns.add(layer)


def _roll_back(cache: PagedCache, wanted: int) -> None:
    """Take back what a press fed for itself, once it has dropped that in all layers."""
    seen = cache.get_seq_length()
    if seen > wanted and max(newest_column(cache, layer) for layer in cache.memory.layers) < wanted:
        cache.crop(-(seen - wanted))


class Bridge:
    """A press behind hooks that are there for its `with` block alone: `with bridge(press)(model): ...`."""

    def __init__(self, press: Any, *, untested: bool = False) -> None:
        """Stand before `press`; `untested` says that its release of kvpress need not be a tested one."""
        self.press = press
        self.untested = untested

    def __getattr__(self, name: str) -> Any:
        """What the press has, such as its `compression_ratio`."""
        return getattr(self.press, name)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Apply the press to the forwards of `model` inside a `with` block.

        Raises:
            UnsupportedMethod: The press drops tokens of single heads, and the cache has one table for all of a layer's;
                or kvpress could hang no hooks on this model.
        """
        decoder = _decoder_of(model)
        if decoder is None:
            raise UnsupportedMethod(f"{type(model).__name__} has no decoder layers with attention to be pressed")
        watch = Watch.on(model) or Watch(decoder)
        watch.bridges.append(self)
        try:
            with self.press(model):
                yield
            watch.settle()
        finally:
            watch.bridges.remove(self)
            if not watch.stays and not watch.bridges:
                watch.remove()


def _decoder_of(model: Any) -> Any:
    """The part of a model on whose layers a press hangs its hooks, None if there is no such part."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None) or ()
    return decoder if any(hasattr(layer, "self_attn") for layer in layers) else None


def _attach(model: Any) -> bool:
    if not presses.is_installed() or (decoder := _decoder_of(model)) is None:
        return False
    watch = Watch.on(model) or Watch(decoder)
    stood, watch.stays = watch.stays, True
    return not stood


def _detach(model: Any) -> None:
    if (watch := Watch.on(model)) is not None:
        watch.remove()


ATTACHMENTS.append(Attachment(_attach, _detach))
