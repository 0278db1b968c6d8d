"""Text of a growing token sequence, and the first stop string in it.

Owns: decoding only what is new, holding back unfinished characters, finding stop strings across token borders.
Does not know: requests, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What tokenizers decode the first bytes of an unfinished character to.
UNFINISHED = "\ufffd"


class Detokenizer:
    """Decodes one output token by token.

    A tokenizer's text for a token depends on the tokens before it (spaces, byte pieces), so a short window of old
    tokens is decoded again with the new ones and the common part is cut off. Costs O(window) a token, not O(output).
    """

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0  # first token that is decoded again
        self._read = 0  # first token whose text is not in `text` yet
        self._found = 0  # where the stop string begins that was found
        self.text = ""

    def append(self, token: int, *, searchable: bool = True) -> str | None:
        """Add a token; returns the stop string that the text now contains, if any.

        Args:
            token: The new token.
            searchable: False before `min_tokens`, when a stop string does not count yet.
        """
        self._ids.append(token)
        old = self._decode(self._ids[self._window : self._read])
        new = self._decode(self._ids[self._window :])
        if new.endswith(UNFINISHED) or len(new) <= len(old):
            return None
        before = len(self.text)
        self.text += new[len(old) :]
        self._window, self._read = self._read, len(self._ids)
        return self._find(before) if searchable and self._stop else None

    def final(self) -> str:
        """The whole text, unfinished characters included."""
        old = self._decode(self._ids[self._window : self._read])
        return self.text + self._decode(self._ids[self._window :])[len(old) :]

    def settled(self) -> str:
        """The text that no later token changes: whole characters, nothing that may begin a stop string."""
        held = max((_overlap(self.text, stop) for stop in self._stop), default=0)
        return self.text[: len(self.text) - held]

    def cut(self, stop: str, *, keep: bool) -> str:
        """The text up to a stop string that `append` reported, with it or without."""
        return self.text[: self._found + len(stop)] if keep else self.text[: self._found]

    def _find(self, before: int) -> str | None:
        """The first stop string that ends behind the first `before` characters."""
        starts = {stop: self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop}
        found = [(at, stop) for stop, at in starts.items() if at >= 0]
        if not found:
            return None
        self._found, stop = min(found)
        return stop

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string begins, short of the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((number for number in range(longest, 0, -1) if text.endswith(stop[:number])), 0)
