"""When a drop-in cache is cropped, and the steps around a crop that a policy may ask for.

Owns: recording queries for a policy, cropping with rewritten keys, crops after a model's forwards.
Does not know: how a policy chooses; the engine has its own schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from allocator import KVError, SeqId
from paged_kv.cache import PagedCache
from paged_kv.compression.budgets import uniform
from paged_kv.keep import check_lanes
from paged_kv.live import LiveTokens, Policy
from paged_kv.memory import PagedMemory
from paged_kv.traits import budget_in, queries_needed, why_no_policy


def record_queries(cache: PagedCache | PagedMemory, policy: Policy) -> None:
    """Keep as many of the newest queries as a policy scores with; call before the forward that it looks back on.

    Raises:
        KVError: The cache was not made with `for_model` and has seen no forward yet.
    """
    needed = queries_needed(policy)
    if needed:
        memory = cache if isinstance(cache, PagedMemory) else cache.memory
        memory.record_queries(needed)


def crop(memory: PagedMemory, seq: SeqId, layer: int, policy: Policy, budget: int) -> int:
    """Crop one layer of one sequence by a policy, keys rewritten if it asks for that; returns the pages freed.

    Raises:
        KVError: As the policy raises; or keys would be rewritten in pages that sequences share. Nothing changed.
    """
    tokens = memory.live_tokens(seq, layer)
    kept = check_lanes(policy.keep(tokens, budget), tokens.num_lanes, policy, layer)
    new_keys = rewritten(policy, tokens, kept)
    if new_keys is not None:
        memory.require_unshared(layer, [seq])
    freed = memory.crop(seq, {(layer, lane): indices for lane, indices in enumerate(kept)})
    for lane, keys in enumerate(new_keys or ()):
        values = tokens.values[lane][:, np.asarray(kept[lane])]
        memory.overwrite(seq, layer, lane, keys, values)
    return freed


def compress(cache: PagedCache, policy: Policy, budget: int | Mapping[int, int] | None = None) -> int:
    """Crop the layers of a drop-in cache by a policy.

    Args:
        cache: What a model was run with.
        policy: Chooses the tokens.
        budget: Tokens that every lane may keep: the same in all layers, or by layer index; the policy's own by default.

    Returns:
        Pages freed.

    Raises:
        KVError: As `PagedCache.crop_layers` and the policy; nothing changed.
    """
    _require_policy(policy)
    budgets = _budgets(cache, policy, budget)
    noting = _Noting(policy)
    if getattr(policy, "rerotate", False):
        for layer in budgets:
            cache.require_unshared(layer)
    freed = cache.crop_layers(budgets, noting)
    for layer, rows in noting.new_keys.items():
        dense = cache.layers[layer].keys
        for row, lanes in enumerate(rows):
            heads = 0
            for keys in lanes:
                dense[row, heads : heads + keys.shape[0], : keys.shape[1]] = keys
                heads += keys.shape[0]
        values = cache.layers[layer].values
        cache.layers[layer].keys = dense
        cache.layers[layer].values = values
    return freed


def _require_policy(policy: object) -> None:
    """Refuse what chooses no tokens.

    Raises:
        KVError: The message says what to do with a press of kvpress.
    """
    if reason := why_no_policy(policy):
        raise KVError(reason)


def _budgets(cache: PagedCache, policy: Policy, budget: int | Mapping[int, int] | None) -> Mapping[int, int]:
    """What each layer keeps, as told or as the policy says.

    Raises:
        KVError: Neither says it.
    """
    if isinstance(budget, Mapping):
        return budget
    if budget is not None:
        return uniform(cache.memory.layers, budget)
    own = {layer: budget_in(policy, layer) for layer in cache.memory.layers}
    budgets = {layer: tokens for layer, tokens in own.items() if tokens is not None}
    if not budgets:
        raise KVError(f"no budget: say how many tokens {type(policy).__name__} may keep, here or as its budget")
    return budgets


@contextmanager
def compressing(
    model: Any,
    policy: Policy,
    budget: int | Mapping[int, int] | None = None,
    *,
    every: int | None = None,
    longest: int | None = None,
) -> Iterator[None]:
    """Crop the `PagedCache` of each forward of `model` inside a `with` block, by hooks on this model alone.

    Args:
        model: A transformers model.
        policy: Chooses the tokens.
        budget: Tokens that every lane may keep: the same in all layers, or by layer index; the policy's own by default.
        every: Crop again whenever so many tokens were added; by default after the prefill only.
        longest: Crop again whenever a layer holds more than so many tokens.

    Raises:
        ValueError: `every` or `longest` is below 1.
        KVError: What is given for a policy is none.
    """
    _require_policy(policy)
    for name, value in (("every", every), ("longest", longest)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 token, got {value}")
    schedule = _Schedule(policy, budget, every, longest)
    hooks = [
        model.register_forward_pre_hook(schedule.before, with_kwargs=True),
        model.register_forward_hook(schedule.after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Schedule:
    """The moments at which caches are cropped."""

    def __init__(
        self, policy: Policy, budget: int | Mapping[int, int] | None, every: int | None, longest: int | None
    ) -> None:
        self._policy, self._budget, self._every, self._longest = policy, budget, every, longest
        self._cropped_at: int | None = None

    def before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = cache_in(kwargs)
        if cache is None:
            return
        record_queries(cache, self._policy)
        if cache.get_seq_length() == 0:
            self._cropped_at = None

    def after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = cache_in(kwargs)
        if cache is None:
            return
        seen = cache.get_seq_length()
        first = self._cropped_at is None
        due = self._every is not None and self._cropped_at is not None and seen - self._cropped_at >= self._every
        full = self._longest is not None and max(cache.layer_lengths()) > self._longest
        if first or due or full:
            compress(cache, self._policy, self._budget)
            self._cropped_at = seen


def cache_in(kwargs: Mapping[str, Any]) -> PagedCache | None:
    """The `PagedCache` among a forward's arguments, under either of its names."""
    for name in ("past_key_values", "cache"):
        if isinstance(cache := kwargs.get(name), PagedCache):
            return cache
    return None


def rewritten(policy: Policy, tokens: LiveTokens, kept: Sequence[np.ndarray]) -> list[Tensor] | None:
    """The keys that a policy wants in place of those it keeps, if it rewrites any."""
    rewrite = getattr(policy, "rewrite", None)
    return None if rewrite is None else rewrite(tokens, kept)


class _Noting:
    """A policy as `crop_layers` calls it, row by row, that remembers the keys to be written afterwards."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.new_keys: dict[int, list[list[Tensor]]] = {}

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        kept = self._policy.keep(tokens, budget)
        keys = rewritten(self._policy, tokens, kept)
        if keys is not None:
            self.new_keys.setdefault(tokens.layer, []).append(keys)
        return kept
