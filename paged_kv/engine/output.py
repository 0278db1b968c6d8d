"""Results: what is handed back for a request.

Owns: building `RequestOutput` from a request's rows, ranking of completions.
Does not know: why a row ended.
"""

from __future__ import annotations

from typing import Any

from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import CompletionOutput, Request, RequestOutput, Row


def of_request(request: Request, tokenizer: Any, *, finished: bool) -> RequestOutput:
    """The result of a request, or what there is of it so far."""
    rows = _ranked(request) if finished else sorted([*request.done, *request.rows], key=lambda row: row.index)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids,
        outputs=[_completion(row, index, tokenizer) for index, row in enumerate(rows)],
        finished=finished,
        prompt_logprobs=request.prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens,
        timings=dict(request.timings),
        error=request.error,
    )


def refused(request_id: str, prompt: str | None, message: str, token_ids: list[int] | None = None) -> RequestOutput:
    """The result of a request that could not be started."""
    return RequestOutput(request_id, prompt, token_ids or [], [], error=message)


def text_of(row: Row, tokenizer: Any) -> str:
    """A row's output as text, empty without a tokenizer."""
    if row.text is not None:
        return row.text
    if tokenizer is None or not row.request.params.detokenize:
        return ""
    if row.detokenizer is not None:
        return str(row.detokenizer.final())
    skip = row.request.params.skip_special_tokens
    return str(tokenizer.decode(row.output_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _ranked(request: Request) -> list[Row]:
    """The `n` best completions: beams by score, `best_of` by mean log probability, otherwise in order."""
    params: SamplingParams = request.params
    rows = sorted(request.done, key=lambda row: row.index)
    if params.best_of is not None and params.best_of > params.n:
        rows.sort(key=lambda row: -row.cumulative_logprob / max(1, row.num_output))
    return rows[: params.n]


def _completion(row: Row, index: int, tokenizer: Any) -> CompletionOutput:
    params = row.request.params
    ranked = params.logprobs is not None or params.beam_width is not None or (params.best_of or 0) > params.n
    return CompletionOutput(
        index=index,
        text=text_of(row, tokenizer),
        token_ids=row.output_ids,
        cumulative_logprob=row.cumulative_logprob if ranked else None,
        logprobs=list(row.logprobs) if params.logprobs is not None else None,
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
    )
