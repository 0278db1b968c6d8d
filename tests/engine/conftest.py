"""Fixtures of the engine's tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import tiny


@pytest.fixture(scope="session")
def llama() -> Any:
    return tiny("llama")


class Words:
    """A tokenizer without files: one token per letter, `eos` is token 2."""

    chat_template = "yes"

    def __init__(self) -> None:
        self.letters = [chr(code) for code in range(32, 127)]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [3 + self.letters.index(letter) for letter in text if letter in self.letters[:94]]}

    def decode(self, ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(self.letters[token - 3] if token >= 3 else "" if skip_special_tokens else "<s>" for token in ids)

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return "".join(f"{message['role']}:{message['content']};" for message in messages)


@pytest.fixture
def words() -> Words:
    return Words()
