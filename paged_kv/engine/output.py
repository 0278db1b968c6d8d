"""Results: what is handed back for a request.

Owns: building `RequestOutput` from a request's rows, ranking of completions, what is new since the last result.
Does not know: why a row ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_kv.engine.params import RequestOutputKind, SamplingParams
from paged_kv.engine.request import CompletionOutput, Request, RequestOutput, Row


def of_request(request: Request, tokenizer: Any) -> RequestOutput:
    """The result of a finished request."""
    if _in_pieces(request):
        return _piece(request, tokenizer, finished=True)
    outputs = [_completion(row, index, tokenizer) for index, row in enumerate(_ranked(request))]
    return _result(request, outputs, finished=True)


def so_far(request: Request, tokenizer: Any) -> RequestOutput | None:
    """A result of a running request that streams, None if there is no news.

    Its text ends before unfinished characters and what may turn out to be a stop string.
    """
    rows = _by_index(request)
    if all(row.num_told == row.num_output for row in rows):
        return None
    if _in_pieces(request):
        return _piece(request, tokenizer, finished=False)
    for row in rows:
        row.num_told = row.num_output
    outputs = [_completion(row, index, tokenizer) for index, row in enumerate(rows)]
    return _result(request, outputs, finished=False)


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
        return str(row.detokenizer.settled() if row.finish_reason is None else row.detokenizer.final())
    skip = row.request.params.skip_special_tokens
    return str(tokenizer.decode(row.output_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _result(request: Request, outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids,
        outputs=outputs,
        finished=finished,
        prompt_logprobs=request.prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens,
        timings=dict(request.timings),
        error=request.error,
    )


def _piece(request: Request, tokenizer: Any, *, finished: bool) -> RequestOutput:
    """What is new; the prompt's log probabilities are in the first piece."""
    is_first = all(row.num_told == 0 for row in _by_index(request))
    result = _result(request, _news(request, tokenizer), finished=finished)
    return result if is_first else replace(result, prompt_logprobs=None)


def _in_pieces(request: Request) -> bool:
    return request.streams and request.params.output_kind is RequestOutputKind.DELTA


def _by_index(request: Request) -> list[Row]:
    return sorted([*request.done, *request.rows], key=lambda row: row.index)


def _news(request: Request, tokenizer: Any) -> list[CompletionOutput]:
    """What is new of each completion, and no more of those whose end was reported; counts as reported from now on."""
    news = []
    for row in _by_index(request):
        if row.end_told or (row.num_told == row.num_output and row.finish_reason is None):
            continue
        whole = _completion(row, row.index, tokenizer)
        news.append(
            replace(
                whole,
                text=whole.text[row.len_told :],
                token_ids=whole.token_ids[row.num_told :],
                logprobs=None if whole.logprobs is None else whole.logprobs[row.num_told :],
            )
        )
        row.num_told, row.len_told = row.num_output, max(row.len_told, len(whole.text))
        row.end_told = row.finish_reason is not None
    return news


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
