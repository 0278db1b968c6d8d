"""What a structured output is held to: a JSON schema, a regular expression, a choice, or a grammar.

Owns: the forms in which a user asks for it, and their checks.
Does not know: tokens, tokenizers, the library that follows the grammar.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

#: The forms; exactly one is given.
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What an output must look like; give exactly one of the first five. Names as in vLLM.

    Attributes:
        json: A JSON schema, as a mapping, as text, or a class with `model_json_schema` (pydantic).
        regex: The whole output matches it (Rust's syntax: no look-around, no back references).
        choice: The output is one of these strings.
        grammar: A grammar in Lark's or GBNF's syntax; llguidance documents what of it is understood.
        json_object: True for any JSON object.
        disable_any_whitespace: JSON without spaces between its parts.
        whitespace_pattern: A regular expression of what may stand between the parts of JSON.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs needs one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"structured_outputs.{name} is text, got {value!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))

    @classmethod
    def of(cls, asked: Any) -> StructuredOutputsParams:
        """From a mapping of its fields (a line of JSON), or as it is.

        Raises:
            ValueError: An unknown field, or a value of the wrong kind.
        """
        if isinstance(asked, cls):
            return asked
        if not isinstance(asked, Mapping):
            raise ValueError(f"structured_outputs is a StructuredOutputsParams or a mapping, got {asked!r}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(asked) - set(known)):
            raise ValueError(f"unknown field {unknown[0]!r} of structured_outputs; known are {', '.join(known)}")
        return cls(**asked)

    @property
    def kind(self) -> str:
        """Which of the forms is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"structured_outputs.choice is a list of strings, got {value!r}")
    for each in value:
        if not isinstance(each, str) or not each:
            raise ValueError(f"structured_outputs.choice holds strings that are not empty, got {each!r}")
    return tuple(value)


def _schema(value: Any) -> str:
    """A schema as text, its keys in the order in which they are written in the output."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json_module.loads(value)
        except ValueError as error:
            raise ValueError(f"structured_outputs.json is not JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise ValueError(f"structured_outputs.json is a JSON schema, got {value!r}")
    try:
        return json_module.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.json cannot be written as JSON: {error}") from None
