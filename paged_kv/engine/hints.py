"""Which waiting prompts would gain by waiting for a prompt that is being computed.

Owns: hashes of prompt blocks, as hints only: a collision makes a row wait a step for nothing.
Does not know: the prefix index, pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from paged_kv.engine.request import Row

#: A row waits for another's prefill if it can take over at least this share of its tokens, and two pages.
MIN_SHARED_FRACTION = 1 / 8


class PrefixHints:
    """Compares prompts block by block; `page_size` None turns it off."""

    def __init__(self, page_size: int | None) -> None:
        self._size = page_size

    def in_flight(self, rows: Iterable[Row]) -> set[int]:
        """Keys of the blocks that rows are about to publish."""
        keys: set[int] = set()
        if self._size is not None:
            for row in rows:
                if row.num_todo > 1:
                    keys.update(self._keys(row, self._size)[row.num_computed // self._size :])
        return keys

    def is_worth_waiting(self, row: Row, in_flight: set[int]) -> bool:
        """Whether a waiting row would save enough by waiting until those blocks are published."""
        if self._size is None or not in_flight:
            return False
        usable = self._keys(row, self._size)[: (len(row.tokens) - 1) // self._size]
        if (most := row.request.most_cached) is not None:
            usable = usable[: most // self._size]
        saved = self._size * sum(key in in_flight for key in usable)
        return saved >= max(2 * self._size, MIN_SHARED_FRACTION * len(row.tokens))

    @staticmethod
    def _keys(row: Row, size: int) -> list[int]:
        """Chained hashes of the full blocks of a row's tokens when it was first seen."""
        if row.block_keys is None:
            key = hash(row.request.scope)
            row.block_keys = []
            for start in range(0, len(row.tokens) - size + 1, size):
                key = hash((key, *row.tokens[start : start + size]))
                row.block_keys.append(key)
        return row.block_keys
