"""When a row is cropped, in integers.

Owns: the moments of a request's crops, and what follows from them for scheduling: how far a row may be computed, how
many tokens its longest layer will hold, how much of its prompt may come from the prefix cache.
Does not know: torch, pages, how a policy chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_kv.live import Policy


@dataclass(frozen=True, slots=True)
class CropPlan:
    """The crops of one request, for the layers of its model.

    Crops fall on the same tokens however a row is batched, chunked or recomputed.

    Attributes:
        policy: Chooses the tokens.
        budgets: Tokens that each lane keeps, by model layer index; empty if crops happen under pressure alone.
        every: Output tokens between two crops.
        longest: Tokens in the longest layer that bring about a crop.
        chunk: Prompt tokens between two crops.
        floor: Tokens that each lane keeps when the pool runs out; None if this request must not be cropped then.
        num_queries: Newest queries that the policy reads.
        is_partial: Whether some layers keep all their tokens.
    """

    policy: Policy
    budgets: Mapping[int, int]
    every: int | None = field(default=None, kw_only=True)
    longest: int | None = field(default=None, kw_only=True)
    chunk: int | None = field(default=None, kw_only=True)
    floor: int | None = field(default=None, kw_only=True)
    num_queries: int = field(default=0, kw_only=True)
    is_partial: bool = field(default=False, kw_only=True)

    def is_due(self, num_prompt: int, num_computed: int, num_live: int) -> bool:
        """Whether to crop now.

        Args:
            num_prompt: Tokens of the prompt.
            num_computed: Tokens computed so far.
            num_live: Tokens in the longest of the cropped layers.
        """
        if not self.budgets:
            return False
        if num_computed <= num_prompt:
            return num_computed == num_prompt or (self.chunk is not None and num_computed % self.chunk == 0)
        if self.longest is not None and num_live >= self.longest:
            return True
        return self.every is not None and (num_computed - num_prompt) % self.every == 0

    def until_due(self, num_prompt: int, num_computed: int, num_live: int) -> int | None:
        """Tokens to compute until the next crop, at least 1; None if there is none."""
        if not self.budgets:
            return None
        if num_computed < num_prompt:
            left = num_prompt - num_computed
            return left if self.chunk is None else min(left, self.chunk - num_computed % self.chunk)
        waits = []
        if self.every is not None:
            waits.append(self.every - (num_computed - num_prompt) % self.every)
        if self.longest is not None:
            waits.append(max(1, self.longest - num_live))
        return min(waits, default=None)

    @property
    def crops_output(self) -> bool:
        """Whether anything may still be cropped once the prompt is."""
        return self.every is not None or self.longest is not None or self.floor is not None

    @property
    def bounds_output(self) -> bool:
        """Whether scheduled crops bound what the longest layer holds, however long the output gets."""
        return bool(self.budgets) and not self.is_partial and (self.every is not None or self.longest is not None)

    def most_live(self, num_prompt: int, num_tokens: int) -> int:
        """Tokens that the longest layer holds at most on the way to `num_tokens`, prompt and output."""
        if not self.budgets or self.is_partial:
            return num_tokens
        prompt = min(num_prompt, num_tokens)
        if self.chunk is not None:
            prompt = min(prompt, max(self.budgets.values()) + self.chunk)
        return max(prompt, self.most_live_after(num_prompt, num_tokens))

    def most_live_after(self, num_prompt: int, num_tokens: int) -> int:
        """The same once the prompt has been cropped."""
        if not self.budgets or self.is_partial:
            return num_tokens
        budget = max(self.budgets.values())
        after = min(budget, num_prompt) + max(0, num_tokens - num_prompt)
        if self.every is not None:
            after = min(after, budget + self.every)
        return after if self.longest is None else min(after, self.longest)

    def reusable(self, num_prompt: int) -> int:
        """Prompt tokens that may come from the prefix cache: the first crop must find its queries, and fall due."""
        first = num_prompt if self.chunk is None else min(self.chunk, num_prompt)
        return max(0, first - max(1, self.num_queries))
