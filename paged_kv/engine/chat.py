"""A conversation to a prompt, through the tokenizer's own template.

Owns: text in content parts, what the template refuses.
Does not know: how the prompt is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_kv.engine.intake import InvalidRequest

#: Types of content parts that are plain text, in OpenAI's two endpoints.
_TEXT_PARTS = ("text", "input_text", "output_text")
#: Arguments of vLLM's `chat` that are no business of the template's.
_NOT_HERE = ("lora_request", "mm_processor_kwargs")


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any) -> dict[str, Any]:
    """The prompt that a conversation stands for.

    Args:
        tokenizer: With a chat template.
        messages: With `role` and `content`: text, or a list of text parts.
        **template: Further arguments of `apply_chat_template`, also together as `chat_template_kwargs`.

    Raises:
        InvalidRequest: There is no tokenizer, or it has no chat template, or the template refuses the messages, or a
            message holds anything but text.
        TypeError: One of vLLM's arguments that asks for what is not here.
    """
    for name in _NOT_HERE:
        if template.pop(name, None) is not None:
            raise TypeError(f"chat takes no {name}: this engine runs one model on text")
    template.pop("chat_template_content_format", None)  # content is always given as text
    template |= template.pop("chat_template_kwargs", None) or {}
    if tokenizer is None or not (template.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        raise InvalidRequest("messages need a tokenizer with a chat template: give a prompt instead")
    if template.get("continue_final_message"):
        template.setdefault("add_generation_prompt", False)
    arguments = {"add_generation_prompt": True, "tokenize": False, **template}
    given: Any = messages
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest(f"a conversation is a list of messages, got {type(messages).__name__}")
    flat = [_flat(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(flat, **arguments)
    except KeyError as error:
        raise InvalidRequest(f"the chat template refused the messages: one of them has no {error}") from error
    except Exception as error:
        raise InvalidRequest(f"the chat template refused the messages: {error}") from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"prompt": text, "prompt_token_ids": list(ids)}


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text: parts are joined line by line."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"a message is a mapping with role and content, got {type(message).__name__}")
    content = message.get("content")
    if isinstance(content, (str, type(None))):
        return dict(message)
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"content is text or a list of parts, got {type(content).__name__}")
    return {**message, "content": "\n".join(map(_text, content))}


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(f"content parts of type {kind!r} are not supported: this engine takes text")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"a content part of type {kind!r} needs a field text, got {text!r}")
    return text
