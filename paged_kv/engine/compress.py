"""What a request asks of compression: which policy, to how many tokens, when.

Owns: the forms in which a user says it, their ranges, budgets of a model's layers.
Does not know: torch, how a policy chooses, how pages are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.engine.crops import CropPlan
from paged_kv.traits import budget_in, protected_by, queries_needed, why_no_policy

if TYPE_CHECKING:
    from paged_kv.live import Policy


@dataclass(frozen=True, slots=True)
class Compression:
    """Crop a request's layers: at the end of its prompt, and if wanted before, after, and when the pool runs out.

    Attributes:
        policy: Chooses the tokens.
        budget: Tokens that each lane of each layer keeps: one number for all layers, one per layer in order, or by
            model layer index (layers that are not named keep all). None takes the policy's own `budget`; if it brings
            none either, only pressure crops.
        every: Crop again after so many output tokens.
        longest: Crop again when a layer holds so many tokens, mean over its lanes.
        chunk: Compute the prompt in pieces of at most so many tokens with a crop after each, so that a layer never
            holds more than `budget + chunk`. None computes all of it before the first crop.
        floor: When the pool runs out, this request may be cropped to so many tokens a lane, so that nobody is
            preempted. None never does that.
    """

    policy: Policy
    budget: int | Sequence[int] | Mapping[int, int] | None = None
    every: int | None = None
    longest: int | None = field(default=None, kw_only=True)
    chunk: int | None = field(default=None, kw_only=True)
    floor: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if reason := why_no_policy(self.policy):
            raise ValueError(reason)
        if isinstance(self.budget, (list, range)):
            object.__setattr__(self, "budget", tuple(self.budget))
        _check_budgets(self.policy, _numbers(self.budget))
        for name in ("every", "longest", "chunk"):
            value = getattr(self, name)
            if value is not None and (not _is_tokens(value) or value < 1):
                raise ValueError(f"{name} must be a number of tokens, at least 1, got {value!r}")
        if self.floor is not None:
            _check_budgets(self.policy, [self.floor], "floor")

    @classmethod
    def of(cls, asked: Any) -> Compression:
        """A policy with a budget of its own, or a `Compression` as it is.

        Raises:
            ValueError: Neither.
        """
        return asked if isinstance(asked, Compression) else cls(asked)

    def for_layers(self, layers: Sequence[int], *, shares: bool = False) -> CropPlan:
        """What this means for a model with these paged layers.

        Args:
            layers: Model layer indices.
            shares: Whether requests share the pages of equal prefixes.

        Raises:
            ValueError: As many budgets as layers were expected; no budget at all; budgets that conflict with when.
        """
        if shares and getattr(self.policy, "rerotate", False):
            raise ValueError("rerotate=True rewrites keys, which requests may share: set enable_prefix_caching=False")
        budgets = self._of_layers(layers)
        _check_budgets(self.policy, budgets.values())
        if not budgets and self.floor is None:
            name = type(self.policy).__name__
            raise ValueError(f"how many tokens may stay? {name}(budget=256), or Compression({name}(), 256)")
        if not budgets and (self.every or self.longest or self.chunk):
            raise ValueError("every, longest and chunk need a budget")
        most = max(budgets.values(), default=0)
        if self.longest is not None and self.longest <= most:
            raise ValueError(f"longest={self.longest} must be above the largest budget of {most} tokens")
        return CropPlan(
            self.policy,
            budgets,
            every=self.every,
            longest=self.longest,
            chunk=self.chunk,
            floor=self.floor,
            num_queries=queries_needed(self.policy),
            is_partial=len(budgets) < len(layers),
        )

    def _of_layers(self, layers: Sequence[int]) -> dict[int, int]:
        """Budgets by layer index; empty if nobody says any."""
        if self.budget is None:
            own = {layer: budget_in(self.policy, layer) for layer in layers}
            return {layer: budget for layer, budget in own.items() if budget is not None}
        if isinstance(self.budget, Mapping):
            if unknown := set(self.budget) - set(layers):
                raise ValueError(f"no paged layer {min(unknown)}; paged layers are {list(layers)}")
            return dict(self.budget)
        if isinstance(self.budget, int):
            return dict.fromkeys(layers, self.budget)
        if len(self.budget) != len(layers):
            raise ValueError(f"the model has {len(layers)} paged layers, got {len(self.budget)} budgets")
        return dict(zip(layers, self.budget, strict=True))


def _numbers(budget: Any) -> list[Any]:
    """The numbers in any form of budget."""
    if budget is None:
        return []
    if isinstance(budget, Mapping):
        return list(budget.values())
    return list(budget) if isinstance(budget, tuple) else [budget]


def _is_tokens(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_budgets(policy: object, budgets: Iterable[Any], name: str = "budget") -> None:
    """Refuse what is no number of tokens, or less than the policy always keeps.

    Raises:
        ValueError: The message names the value, and the policy with what it keeps.
    """
    for budget in budgets:
        if not _is_tokens(budget) or budget < 1:
            raise ValueError(f"a {name} is a number of tokens, at least 1, got {budget!r}")
        if budget < (protected := protected_by(policy)):
            raise ValueError(f"{type(policy).__name__} always keeps {protected} tokens, got a {name} of {budget}")


def ramp(mean: int, num_layers: int, spread: float) -> tuple[int, ...]:
    """Budgets that fall in a straight line over the layers and keep their mean, as PyramidKV shapes them.

    Args:
        mean: Mean budget in tokens.
        num_layers: Paged layers.
        spread: The first layer gets `mean * (1 + spread)`, the last `mean * (1 - spread)`; 0 for equal budgets.

    Source: Cai et al., "PyramidKV", 2024 (arXiv 2406.02069). Here the line is given by its spread, not by a window.
    """
    if not 0 <= spread < 1:
        raise ValueError(f"spread must be at least 0 and below 1, got {spread}")
    line = np.linspace(1 + spread, 1 - spread, num_layers) if num_layers > 1 else np.ones(1)
    return tuple(max(1, round(mean * float(share))) for share in line)
