"""What a policy tells of itself without being run: its budget, the tokens it always keeps, the queries it reads.

All three are optional attributes of a policy, so that anything with a method `keep` is one.

Owns: what makes a policy one; reading them, through policies that are made of policies.
Does not know: torch, methods, when to crop.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Tokens that each lane keeps: the same in all layers, by model layer index, or not said.
TokenBudget = int | Mapping[int, int] | None


def why_no_policy(policy: object) -> str | None:
    """Why something chooses no tokens, and what to do if it is a press of kvpress; None for a policy."""
    if callable(getattr(policy, "keep", None)):
        return None
    is_press = any(base.__module__.split(".")[0] == "kvpress" for base in type(policy).__mro__)
    hint = "; paged_kv.compression.kvpress.policy(press, budget=...) makes one of a press" if is_press else ""
    return f"a policy chooses with a method `keep`, {type(policy).__name__} has none{hint}"


def budget_in(policy: object, layer: int) -> int | None:
    """The budget that a policy brings for a layer: its own, or that of the policy inside which decides there."""
    while policy is not None:
        budget: TokenBudget = getattr(policy, "budget", None)
        if isinstance(budget, Mapping):
            return budget.get(layer)
        if budget is not None:
            return budget
        decider = getattr(policy, "decider", None)
        policy = None if decider is None else decider(layer)
    return None


def protected_by(policy: object) -> int:
    """Tokens that a policy always keeps: its `num_protected`, 0 if it has none."""
    return int(getattr(policy, "num_protected", 0))


def queries_needed(policy: object) -> int:
    """How many of the newest queries a policy scores with: its `needs_queries`, 0 if it has none."""
    return int(getattr(policy, "needs_queries", 0))
