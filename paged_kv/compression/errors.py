"""What can go wrong when a policy is asked for a keep-set.

KVError
├── BudgetTooSmall: fewer tokens than the policy always keeps
├── NeedsQueries: a policy scores with queries that nobody recorded
└── UnsupportedMethod: a method needs something that the model, the cache or the installed package lacks
"""

from __future__ import annotations

from allocator import KVError

__all__ = ["BudgetTooSmall", "NeedsQueries", "UnsupportedMethod"]


class BudgetTooSmall(KVError, ValueError):
    """Raised when a budget is below what a policy always keeps. Do: raise the budget, or protect less."""

    def __init__(self, policy: object, protected: int, budget: int) -> None:
        """Name the policy and both numbers of tokens."""
        super().__init__(f"{type(policy).__name__} always keeps {protected} tokens, got a budget of {budget}")
        self.protected, self.budget = protected, budget


class NeedsQueries(KVError):
    """Raised when a policy needs queries and none are recorded. Do: `record_queries(cache, policy)` before prefill."""

    def __init__(self, layer: int) -> None:
        """Name the layer."""
        super().__init__(
            f"no queries are recorded for the newest tokens of layer {layer}: call record_queries(cache, policy) "
            "before the forward whose queries the policy scores with"
        )
        self.layer = layer


class UnsupportedMethod(KVError):
    """Raised when a method needs something that is not there; the message names it."""
