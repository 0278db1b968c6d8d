"""A press of kvpress seen as a policy: live tokens in, keep-sets by budget out, no model run.

A press's `score` and `compress` are given a stand-in for the attention module, in which the recorded queries stand
where hidden states would be projected. Ratios of presses are ignored: the budget decides.

Owns: which presses can be policies, the stand-in, reading keep-sets off what a press returns.
Does not know: hooks, caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.assign import survivors
from paged_kv.compression.adakv import AdaKV
from paged_kv.compression.base import ScorePolicy, check_budget
from paged_kv.compression.errors import NeedsQueries, UnsupportedMethod
from paged_kv.compression.expected import ExpectedAttention
from paged_kv.live import LiveTokens, Policy
from paged_kv.traits import TokenBudget

#: Why a press cannot be a policy, by the name of its class.
REFUSED = {
    "KVzipPress": "it replays the prompt through the model",
    "RestoreKVPress": "it replays the prompt through the model",
    "KVgradPress": "it runs the model backwards",
    "FastKVzipPress": "it scores hidden states with gates of its own",
    "KVzapPress": "it scores hidden states with a model of its own",
    "KVComposePress": "it decides over all layers at once",
    "SimLayerKVPress": "it decides by itself how much a layer keeps",
    "DuoAttentionPress": "it decides by itself how much a head keeps",
    "DMSPress": "it decides by a threshold, not by a budget",
    "LUKVPress": "it decides by itself how much a head keeps",
    "ThinKPress": "it prunes channels, not tokens",
    "CAMPress": "it merges tokens while decoding",
    "MergingPress": "it merges tokens",
    "FinchPress": "it reads a delimiter in the prompt",
    "KeyRerotationPress": "it rewrites keys; use StreamingLLM(rerotate=True)",
    "DecodingPress": "when to crop is the caller's; give its base press",
    "PrefillDecodingPress": "when to crop is the caller's; give one of its presses",
    "CompressionRatioDecodingPress": "when to crop is the caller's; give its base press",
    "ObservedAttentionPress": "it needs attention weights of all queries; use H2O",
    "ComposedPress": "each of its presses needs a budget; use Chain",
    "ExpectedAttentionStatsPress": "it reads statistics that are loaded for a model",
}

#: Newest queries that a press scores with, by the name of its class: a number, or the attribute that says it less one.
QUERIES: dict[str, int | str] = {
    "SnapKVPress": "window_size",
    "PyramidKVPress": "window_size",
    "TOVAPress": 2,
}

#: Tokens that a press keeps whatever they score, by the name of its class: the attribute that says it.
PROTECTED = {
    "SnapKVPress": "window_size",
    "PyramidKVPress": "window_size",
    "StreamingLLMPress": "n_sink",
    "LagKVPress": "n_sink",
}


def policy_of(press: Any, model: Any, budget: TokenBudget = None) -> Policy:
    """The policy that a press amounts to.

    Raises:
        UnsupportedMethod: It needs more than a layer's tokens, or a model that was not given.
    """
    name = type(press).__name__
    if name in REFUSED:
        raise UnsupportedMethod(f"{name} cannot be a policy: {REFUSED[name]}")
    if name == "ExpectedAttentionPress":
        if model is None:
            raise UnsupportedMethod("ExpectedAttentionPress needs the model's rotary embedding: policy(press, model)")
        if press.use_covariance and press.use_vnorm and press.epsilon == 0:
            return ExpectedAttention.for_model(
                model, sinks=press.n_sink, horizon=press.n_future_positions, budget=budget
            )
        raise UnsupportedMethod("ExpectedAttentionPress can be a policy with its default scores alone")
    if name == "PerLayerCompressionPress":
        return policy_of(press.press, model, budget)
    if not hasattr(press, "compress") or not hasattr(press, "compression_ratio"):
        raise UnsupportedMethod(f"{name} is no press that takes a ratio")
    return PressPolicy(press, model, budget=budget)


@dataclass(frozen=True, slots=True)
class PressPolicy(ScorePolicy):
    """A press that scores tokens, or selects them, called with a stand-in for its attention module.

    Attributes:
        press: The press; its ratio is ignored.
        model: For presses that read weights, else None.
        budget: Tokens to keep where nothing else says how many.
    """

    press: Any
    model: Any = None
    budget: TokenBudget = field(default=None, kw_only=True)

    @property
    def needs_queries(self) -> int:
        """What the press's window says."""
        inner = getattr(self.press, "press", self.press)
        known = QUERIES.get(type(inner).__name__, 0)
        return int(getattr(inner, known)) + 1 if isinstance(known, str) else known

    @property
    def num_protected(self) -> int:
        """The press's window or sinks."""
        inner = getattr(self.press, "press", self.press)
        name = PROTECTED.get(type(inner).__name__)
        return 0 if name is None else int(getattr(inner, name))

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """What the press would keep at this budget; see `Policy.keep`."""
        check_budget(budget, self.num_protected, self.press)
        lens = [len(positions) for positions in tokens.positions]
        if min(lens) == max(lens):
            if lens[0] <= budget:
                return [np.arange(live) for live in lens]
            with self._at_ratio(_ratio(lens[0], budget)):
                if hasattr(self.press, "score"):
                    return ScorePolicy.keep(self, tokens, budget)
                return self._select(tokens, budget)
        if type(self.press).__name__ == "AdaKVPress":
            return AdaKV(PressPolicy(self.press.press, self.model), self.press.alpha_safeguard).keep(tokens, budget)
        return [self.keep(only_lane(tokens, lane), budget)[0] for lane in range(tokens.num_lanes)]

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """The press's scores: `[heads_per_lane, live]`."""
        if len({len(positions) for positions in tokens.positions}) > 1:
            return self.scores(only_lane(tokens, lane), 0)
        heads = tokens.keys[lane].shape[0]
        scores: Tensor = self._call(self.press.score, self._stand_in(tokens), tokens)[0]
        return scores[lane * heads : (lane + 1) * heads]

    @contextmanager
    def _at_ratio(self, ratio: float) -> Iterator[None]:
        before = self.press.compression_ratio
        self.press.compression_ratio = ratio
        try:
            yield
        finally:
            self.press.compression_ratio = before

    def _select(self, tokens: LiveTokens, budget: int) -> list[np.ndarray]:
        """Live indices that `compress` leaves or masks, at the ratio that is set."""
        keys, values = _joined(tokens.keys), _joined(tokens.values)
        module = self._stand_in(tokens)
        live, heads = keys.shape[2], tokens.keys[0].shape[0]
        new_keys, new_values = self._call(self.press.compress, module, tokens)
        votes = torch.zeros(keys.shape[1], live)
        if module.masked_key_indices is not None:
            votes += 1
            _, head, place = module.masked_key_indices
            votes[head, place] = 0
        else:
            for head in range(keys.shape[1]):
                part = slice(head, head + 1)
                found = survivors((keys[0, part], values[0, part]), (new_keys[0, part], new_values[0, part]))
                votes[head, torch.from_numpy(found.columns[0])] = 1
        if heads == 1:
            return [np.flatnonzero(lane.numpy()) for lane in votes]
        shared = [part.mean(dim=0) for part in torch.split(votes, heads)]
        return [lane.topk(min(budget, live)).indices.sort().values.numpy() for lane in shared]

    def _stand_in(self, tokens: LiveTokens) -> Any:
        """A module of which the press can make queries: it projects the recorded ones to themselves."""
        heads = sum(part.shape[0] for part in tokens.keys)
        width = tokens.keys[0].shape[-1]
        attention = None if self.model is None else self.model.get_decoder().layers[tokens.layer].self_attn
        group = 1 if attention is None else attention.num_key_value_groups
        if tokens.queries is not None:
            group = tokens.queries.states.shape[0] // heads
        config = SimpleNamespace(
            num_attention_heads=heads * group,
            num_key_value_heads=heads,
            head_dim=width,
            hidden_size=getattr(getattr(attention, "config", None), "hidden_size", heads * group * width),
            num_hidden_layers=getattr(getattr(attention, "config", None), "num_hidden_layers", tokens.layer + 1),
            _attn_implementation="paged_kv",
        )
        return SimpleNamespace(
            config=config,
            head_dim=width,
            layer_idx=tokens.layer,
            num_key_value_groups=group,
            q_proj=lambda states: states,
            masked_key_indices=None,
            **({} if attention is None else {"o_proj": getattr(attention, "o_proj", None)}),
        )

    def _call(self, method: Any, module: Any, tokens: LiveTokens) -> Any:
        keys, values = _joined(tokens.keys), _joined(tokens.values)
        if tokens.queries is None:
            if self.needs_queries:
                raise NeedsQueries(tokens.layer)
            hidden, still = keys.new_zeros((1, keys.shape[2], 0)), keys.new_zeros((1, keys.shape[2], keys.shape[3]))
        else:
            hidden = tokens.queries.states.transpose(0, 1).flatten(1)[None]
            still = hidden.new_zeros((1, hidden.shape[1], keys.shape[3]))
        # The recorded queries are rotated already: a rotation by nothing.
        rotation = {"position_embeddings": (still + 1, still)}
        try:
            return method(module, hidden, keys, values, None, rotation)
        except (AttributeError, TypeError, KeyError, AssertionError, RuntimeError) as error:
            raise UnsupportedMethod(
                f"{type(self.press).__name__} needs more than keys, values and {self.needs_queries} recorded queries"
                f"{'' if self.model is not None else ' (or the model: policy(press, model))'}: {error!r}"
            ) from error


def only_lane(tokens: LiveTokens, lane: int) -> LiveTokens:
    """One lane of a layer, and the queries that read it, as a layer of its own."""
    queries = tokens.queries
    if queries is not None:
        group = queries.states.shape[0] // sum(part.shape[0] for part in tokens.keys)
        first = sum(part.shape[0] for part in tokens.keys[:lane]) * group
        queries = replace(queries, states=queries.states[first : first + tokens.keys[lane].shape[0] * group])
    return replace(
        tokens,
        keys=[tokens.keys[lane]],
        values=[tokens.values[lane]],
        positions=[tokens.positions[lane]],
        queries=queries,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All heads as a press takes them: a copy `[1, heads, live, width]`."""
    return torch.cat(list(parts))[None]


def _ratio(live: int, budget: int) -> float:
    """A ratio at which `int(live * (1 - ratio))` is the budget."""
    ratio = 1 - budget / live
    while int(live * (1 - ratio)) < budget:
        ratio -= 1e-9
    return ratio
