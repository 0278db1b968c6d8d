"""When a row ends.

Owns: adding a token to a row, end-of-sequence and stop tokens, stop strings, lengths.
Does not know: pages, batches, logits.
"""

from __future__ import annotations

from typing import Any

from paged_kv.engine.detokenize import Detokenizer
from paged_kv.engine.request import Row
from paged_kv.engine.sampling import Draw


def watch(row: Row, tokenizer: Any, *, streams: bool) -> None:
    """Give a new row a detokenizer, if its text is needed before its end."""
    params = row.request.params
    if tokenizer is not None and params.detokenize and (params.stop or streams):
        row.detokenizer = Detokenizer(tokenizer, stop=params.stop, skip_special_tokens=params.skip_special_tokens)


def take(row: Row, draw: Draw, eos_ids: frozenset[int], tokenizer: Any) -> str | None:
    """Add a token to a row; returns "stop" or "length" if that ends it."""
    params = row.request.params
    token = draw.token
    row.tokens.append(token)
    if draw.logprob is not None:
        row.cumulative_logprob += draw.logprob
    if draw.top is not None:
        row.logprobs.append(draw.top)
    number = row.num_output
    if number >= params.min_tokens:
        ends = not params.ignore_eos and token in eos_ids
        if ends or token in params.stop_token_ids:
            row.stop_reason = None if ends else token
            row.text = _without_last(row, tokenizer)
            return "stop"
    is_complete = row.constraint is not None and row.constraint.advance(token)
    if row.detokenizer is not None:
        stop = row.detokenizer.append(token, searchable=number >= params.min_tokens)
        if stop is not None:
            row.stop_reason = stop
            row.text = row.detokenizer.cut(stop, keep=params.include_stop_str_in_output)
            return "stop"
    if is_complete:
        return "stop"
    if (params.max_tokens is not None and number >= params.max_tokens) or len(row.tokens) >= row.request.max_len:
        return "length"
    return None


def _without_last(row: Row, tokenizer: Any) -> str | None:
    """The text before a token that ended the output, None to decode it all later."""
    params = row.request.params
    if params.include_stop_str_in_output and row.detokenizer is not None:
        row.detokenizer.append(row.tokens[-1], searchable=False)
    if tokenizer is None or not params.detokenize or params.include_stop_str_in_output:
        return None
    if row.detokenizer is not None:
        return str(row.detokenizer.final())
    ids = row.output_ids[:-1]
    return str(
        tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False)
    )
