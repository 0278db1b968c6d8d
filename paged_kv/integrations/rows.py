"""One line of a batch file: what it asks for, and the line that answers it.

Owns: the two forms of a line (the short one and OpenAI's batch form), reading and answering them.
Does not know: files, engines, order.

Short form: `{"prompt": ...}`, `{"prompt_token_ids": [...]}` or `{"messages": [...]}`, with an `id`, a `priority` and
any sampling parameters beside it. OpenAI's form: `{"custom_id", "method", "url", "body"}`, answered with `response` and
`error` as their batch endpoint does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paged_kv.engine.params import InvalidParams, SamplingParams
from paged_kv.engine.request import RequestOutput

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

#: Fields of a short line that are not sampling parameters.
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OWN = (*_PROMPTS, "id", "priority")

#: Fields of an OpenAI body that mean what a sampling parameter of the same name means.
_SAME = (
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
)
#: Fields that change nothing here.
_IGNORED = ("model", "user", "stream", "metadata", "store", "service_tier")
#: Sampling parameters beyond OpenAI's that bodies commonly carry (as vLLM takes them).
_EXTRA = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "bad_words",
    "best_of",
    "structured_outputs",
)


class BadLine(ValueError):
    """Raised when a line cannot be run. Do: correct what is named; the other lines are not touched by it."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A line to run.

    Attributes:
        number: Its line number in the file, from 1.
        prompt: What to complete, None with `messages`.
        messages: A conversation to answer.
        url: The endpoint of OpenAI's form, None for the short form.
        custom_id: The caller's name for the line.
    """

    number: int
    prompt: Any
    messages: Any
    params: SamplingParams
    priority: int = 0
    url: str | None = None
    custom_id: Any = None
    model: Any = None


def parse(line: bytes, number: int, base: SamplingParams) -> BatchRow:
    """Read a line; parameters that it leaves open are those of `base`, its seed `base.seed + number`.

    Raises:
        BadLine: It is not JSON, of neither form, or a value in it is wrong.
    """
    try:
        values = json.loads(line.strip())
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadLine(f"a line is a JSON object, got {type(values).__name__}")
    base = replace(base, seed=(base.seed or 0) + number)
    try:
        if "body" in values or "url" in values:
            return _openai(values, number, base)
        return _short(values, number, base)
    except InvalidParams as error:
        raise BadLine(str(error)) from None


def _short(values: dict[str, Any], number: int, base: SamplingParams) -> BatchRow:
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise BadLine(f"a line needs one of {', '.join(_PROMPTS)}, got {', '.join(given) or 'none'}")
    params = SamplingParams.from_mapping({k: v for k, v in values.items() if k not in _OWN}, base=base, beside=_OWN)
    prompt = values.get("prompt", values.get("prompt_token_ids"))
    if isinstance(values.get("prompt_token_ids"), str):
        raise BadLine("prompt_token_ids is a list of token ids, got text: that is a prompt")
    messages = _messages(values["messages"]) if "messages" in values else None
    priority = values.get("priority", 0)
    if type(priority) is not int:
        raise BadLine(f"priority must be an integer, got {priority!r}")
    return BatchRow(number, _prompt(prompt, messages), messages, params, priority, custom_id=values.get("id"))


def _openai(values: dict[str, Any], number: int, base: SamplingParams) -> BatchRow:
    url, body = values.get("url"), values.get("body")
    if values.get("method", "POST") != "POST":
        raise BadLine(f"method must be POST, got {values['method']!r}")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise BadLine(f"url must be {CHAT_URL} or {COMPLETIONS_URL}, got {url!r}")
    if not isinstance(body, dict):
        raise BadLine("body must be a JSON object")
    wanted = "messages" if url == CHAT_URL else "prompt"
    if wanted not in body:
        raise BadLine(f"body of {url} needs {wanted}")
    taken = {name: body[name] for name in (*_SAME, *_EXTRA) if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        taken["max_tokens"] = body["max_completion_tokens"]
    if (structure := _structure(body.get("response_format"))) is not None:
        if "structured_outputs" in taken:
            raise BadLine("response_format and structured_outputs say the same thing: give one")
        taken["structured_outputs"] = structure
    if body.get("logprobs") not in (None, False):
        asked = body.get("top_logprobs", 0) if body["logprobs"] is True else body["logprobs"]
        taken["logprobs"] = asked
    known = {*_SAME, *_EXTRA, *_IGNORED, "messages", "prompt", "max_completion_tokens", "logprobs", "top_logprobs"}
    known |= {"response_format"}
    if unknown := sorted(set(body) - known):
        raise BadLine(f"unknown body field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    params = SamplingParams.from_mapping(taken, base=base)
    messages = _messages(body["messages"]) if url == CHAT_URL else None
    prompt = _prompt(body.get("prompt"), messages)
    return BatchRow(number, prompt, messages, params, 0, url, values.get("custom_id"), body.get("model"))


def _structure(form: Any) -> dict[str, Any] | None:
    """What OpenAI's `response_format` asks for, as `structured_outputs`."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else form
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise BadLine(f"response_format must be of type text, json_object or json_schema, got {kind!r}")
    named = form.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise BadLine("response_format of type json_schema needs json_schema.schema")
    return {"json": named["schema"]}


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise BadLine("messages must be a list of messages, and not empty")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadLine(f"a message needs role and content, got {json.dumps(message)[:80]}")
    return value


def _prompt(value: Any, messages: Any) -> Any:
    if messages is None and not isinstance(value, (str, list)):
        raise BadLine(f"a prompt is text or a list of token ids, got {type(value).__name__}")
    return value


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(row: BatchRow, result: RequestOutput) -> dict[str, Any]:
    """The line that answers a row. It holds nothing that differs between two runs of the same file."""
    if result.error is not None:
        return failure(row.number, result.error, row=row)
    if row.url is not None:
        return _openai_answer(row, result)
    line: dict[str, Any] = {"line": row.number}
    if row.custom_id is not None:
        line["id"] = row.custom_id
    outputs = [_output(row, output) for output in result.outputs]
    line |= outputs[0] if row.params.n == 1 else {"outputs": outputs}
    line["num_prompt_tokens"] = len(result.prompt_token_ids)
    return line


def failure(number: int, message: str, *, row: BatchRow | None = None, raw: bytes = b"") -> dict[str, Any]:
    """The line that answers a row which could not be run."""
    url, custom_id = (row.url, row.custom_id) if row is not None else _identity(raw)
    if url is not None:
        error = {"code": "invalid_request", "message": f"line {number}: {message}"}
        return {"id": f"line-{number}", "custom_id": custom_id, "response": None, "error": error}
    line: dict[str, Any] = {"line": number}
    if custom_id is not None:
        line["id"] = custom_id
    return line | {"finish_reason": "error", "error": f"line {number}: {message}"}


def is_failure(line: Mapping[str, Any]) -> bool:
    """Whether an answered line says that its row failed."""
    return line.get("finish_reason") == "error" or line.get("error") is not None


def _identity(raw: bytes) -> tuple[str | None, Any]:
    """The form and name of a line that could not be run, as far as they can be read."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(values, dict):
        return None, None
    if "body" in values or "url" in values:
        return str(values.get("url")), values.get("custom_id")
    return None, values.get("id")


def _output(row: BatchRow, output: Any) -> dict[str, Any]:
    line = {"text": output.text, "finish_reason": output.finish_reason, "num_output_tokens": len(output.token_ids)}
    if row.params.logprobs is not None:
        line["token_ids"] = list(output.token_ids)
        line["logprobs"] = [{str(token): value for token, value in top.items()} for top in output.logprobs]
    return line


def _openai_answer(row: BatchRow, result: RequestOutput) -> dict[str, Any]:
    chat = row.url == CHAT_URL
    choices = []
    for output in result.outputs:
        choice: dict[str, Any] = {"index": output.index, "finish_reason": output.finish_reason}
        if row.params.logprobs is not None:
            tops = [{str(token): value for token, value in top.items()} for top in output.logprobs or ()]
            choice["logprobs"] = {"token_ids": list(output.token_ids), "top_logprobs": tops}
        choice |= {"message": {"role": "assistant", "content": output.text}} if chat else {"text": output.text}
        choices.append(choice)
    prompt, completion = len(result.prompt_token_ids), sum(len(output.token_ids) for output in result.outputs)
    body = {
        "id": f"cmpl-{row.number}",
        "object": "chat.completion" if chat else "text_completion",
        "model": row.model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }
    response = {"status_code": 200, "request_id": f"line-{row.number}", "body": body}
    return {"id": f"line-{row.number}", "custom_id": row.custom_id, "response": response, "error": None}
