"""Guessing the next tokens of a row from its own text, for one step to verify.

Owns: the index of a row's n-grams, how many tokens to guess.
Does not know: the model, pages, whether a guess was right: it is told.

A step of few rows reads every weight for a handful of tokens, and a few tokens more cost little. Text that repeats
itself (code, quotations, lists, loops of small models) is guessed well by what followed the same words last time. A
guess that the model does not confirm is taken back, so the output is the same.

Source: Saxena, "Prompt Lookup Decoding", 2023. Here the length of a guess follows how well the last ones did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_kv.engine.request import Row

#: Tokens of a context that must have occurred before, longest first.
ORDERS = (3, 2)
#: Tokens that all rows of a step may have together if some of them are guesses.
MAX_STEP_TOKENS = 16


class Guesser:
    """What followed the last words of one row, the last time they occurred."""

    def __init__(self, max_tokens: int) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._max_tokens = max_tokens
        self.length = min(3, max_tokens)

    def guess(self, tokens: Sequence[int], room: int) -> list[int]:
        """At most `length` and `room` tokens that may come next; none if the context is new. O(new tokens)."""
        self._index(tokens)
        for order in ORDERS:
            begin = self._after.get(tuple(tokens[-order:])) if len(tokens) >= order else None
            if begin is not None:
                # What is longer than the text after `begin` goes round again: loops are guessed to any length.
                period = len(tokens) - begin
                return [tokens[begin + i % period] for i in range(min(room, self.length))]
        return []

    def learn(self, num_guessed: int, num_right: int) -> None:
        """Guess further after a guess that was right to its end, and no further than was right after any other."""
        if num_right == num_guessed:
            self.length = min(self._max_tokens, 2 * self.length)
        else:
            self.length = max(1, num_right)

    def _index(self, tokens: Sequence[int]) -> None:
        """Note where each context ends, all but the one at the very end."""
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for order in ORDERS:
                if end >= order:
                    self._after[tuple(tokens[end - order : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))


def propose(rows: Iterable[Row], max_tokens: int) -> None:
    """Give rows their guesses, if so few run that a guess is worth its place."""
    if not max_tokens:
        return
    running = list(rows)
    room = MAX_STEP_TOKENS // max(1, len(running)) - 1
    if room < 1 or any(row.num_todo != 1 for row in running):
        return
    for row in running:
        request = row.request
        if not row.sampler.plain or request.lockstep or (request.crops is not None and request.crops.num_queries):
            # A rolled-back guess would have overwritten queries that a crop reads.
            continue
        left = request.max_len - len(row.tokens)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - row.num_output)
        if row.guesser is None:
            row.guesser = Guesser(max_tokens)
        row.draft = row.guesser.guess(row.tokens, min(room, left - 1))
