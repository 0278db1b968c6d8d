"""The engine as a stage of a Ray Data pipeline.

Owns: turning a batch of columns into prompts, and results into columns.
Does not know: Ray; it calls what it is given, so nothing of it is imported here.

    dataset.map_batches(RayStage, fn_constructor_kwargs={"model": "path/to/model"}, concurrency=1, batch_size=1024)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_kv.engine.llm import LLM
from paged_kv.engine.params import SamplingParams


class RayStage:
    """Completes the prompts of a batch; one engine a worker.

    A row that cannot be run gets an empty text, "error" as its finish reason and the message in `error`.
    """

    def __init__(
        self,
        model: Any,
        *,
        params: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        messages_column: str = "messages",
        **options: Any,
    ) -> None:
        """Open an engine.

        Args:
            model: A path, or a loaded model.
            params: Sampling parameters of all rows.
            prompt_column: Column with text or token ids.
            messages_column: Column with conversations, taken if there is no `prompt_column`.
            **options: As for `LLM`.
        """
        self._llm = LLM(model, **options)
        self._params = SamplingParams.from_mapping(params or {})
        self._prompt_column = prompt_column
        self._messages_column = messages_column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the columns `text`, `finish_reason`, `num_output_tokens` and `error` to a batch.

        Raises:
            KeyError: The batch has neither column.
        """
        results = self._llm.generate(self._prompts(batch), self._params, use_tqdm=False)
        columns = {
            "text": [result.text for result in results],
            "finish_reason": [result.finish_reason or "" for result in results],
            "num_output_tokens": [sum(len(output.token_ids) for output in result.outputs) for result in results],
            "error": [result.error or "" for result in results],
        }
        return {**batch, **{name: np.array(values) for name, values in columns.items()}}

    def _prompts(self, batch: dict[str, Any]) -> list[Any]:
        if self._prompt_column in batch:
            return [_plain(value) for value in batch[self._prompt_column]]
        if self._messages_column in batch:
            return [self._llm.chat_prompt(list(messages)) for messages in batch[self._messages_column]]
        raise KeyError(
            f"a batch needs a column {self._prompt_column!r} or {self._messages_column!r}, got {sorted(batch)}"
        )


def _plain(value: Any) -> Any:
    """A prompt as the engine takes it: numpy's strings and arrays are turned into Python's."""
    if isinstance(value, str):
        return str(value)
    return [int(token) for token in value]
