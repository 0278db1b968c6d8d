"""Beam search under vLLM's names, on top of `SamplingParams(beam_width=...)`.

Owns: `BeamSearchParams`, `BeamSearchOutput` and what they mean here.
Does not know: how beams are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How `LLM.beam_search` continues a prompt. Names and defaults as in vLLM.

    Attributes:
        beam_width: Beams that are kept, and sequences that are returned.
        max_tokens: Most tokens of the output.
        ignore_eos: Go on after the model's end-of-sequence token.
        temperature: Changes nothing, as in vLLM: beams are ranked by the model's own log probabilities.
        length_penalty: A beam's log probability is divided by the length of its output to this power, as in
            transformers (vLLM counts the prompt too).
        include_stop_str_in_output: Whether the text has the end-of-sequence token; the tokens always have.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> SamplingParams:
        """The same in this engine's words.

        Raises:
            InvalidParams: A value is out of range.
        """
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            detokenize=False,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: Prompt and output.
        cum_logprob: Summed log probability of the output.
        text: Prompt and output as text, None without a tokenizer.
        finish_reason: "stop" after an end-of-sequence token, else "length".
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt.

    Attributes:
        sequences: Best first; none if the prompt could not be run.
        error: Why, then.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


def output_of(result: RequestOutput, params: BeamSearchParams, tokenizer: Any) -> BeamSearchOutput:
    """A result of the engine as vLLM has it."""
    if result.error is not None:
        return BeamSearchOutput([], result.error)
    prompt = result.prompt_token_ids
    return BeamSearchOutput([_sequence(prompt, completion, params, tokenizer) for completion in result.outputs])


def _sequence(
    prompt: Sequence[int], completion: CompletionOutput, params: BeamSearchParams, tokenizer: Any
) -> BeamSearchSequence:
    tokens = [*prompt, *completion.token_ids]
    shown = tokens
    if completion.finish_reason == "stop" and not params.include_stop_str_in_output:
        shown = tokens[:-1]
    text = None
    if tokenizer is not None:
        text = tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return BeamSearchSequence(tokens, completion.cumulative_logprob or 0.0, text, completion.finish_reason)
