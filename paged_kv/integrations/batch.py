"""A batch job: every line of a file through the engine, every answer in its place.

Owns: feeding the engine with a bounded window of lines, collecting answers, stopping between two steps.
Does not know: how lines look on disk or on a screen.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import paged_kv
from paged_kv.engine import SamplingParams
from paged_kv.engine.intake import InvalidRequest
from paged_kv.engine.llm import LLM
from paged_kv.engine.request import RequestOutput
from paged_kv.engine.stats import EngineStats
from paged_kv.integrations.journal import Journal, read_lines
from paged_kv.integrations.rows import BadLine, BatchRow, answer, failure, is_failure, parse


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is.

    Attributes:
        num_rows: Rows of the input.
        num_done: Rows answered, earlier runs included.
        num_new: Rows answered by this run.
        num_errors: Those of them that failed.
        seconds: Since this run began.
    """

    num_rows: int
    num_done: int
    num_new: int
    num_errors: int
    seconds: float
    engine: EngineStats


def manifest_of(
    digest: str, rows: int, model: str, params: SamplingParams, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What makes two runs the same job: input, model, parameters, versions."""
    hidden = ("logits_processors", "output_kind")
    shown = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__ if name not in hidden}
    return {
        "format": 1,
        "input_sha256": digest,
        "rows": rows,
        "model": model,
        "params": {
            name: value if isinstance(value, (int, float, str)) else repr(value) for name, value in shown.items()
        },
        "settings": settings or {},
        "versions": {
            "paged-kv": paged_kv.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


class BatchJob:
    """One input file on its way to one output."""

    def __init__(
        self,
        llm: LLM,
        source: Path,
        journal: Journal,
        base: SamplingParams,
        *,
        window: int | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> None:
        """Prepare a job on an opened journal.

        Args:
            llm: The engine.
            source: The input.
            journal: The output.
            base: Parameters of lines that leave them open.
            window: Most rows read ahead of the oldest unfinished one; bounds memory.
            report: Called after every step.
        """
        self._llm = llm
        self._source = source
        self._journal = journal
        self._base = base
        self._window = window or 8 * llm.engine.options.max_num_seqs
        self._report = report
        self._pending: dict[str, tuple[int, BatchRow]] = {}
        self._started = time.monotonic()
        self._num_new = 0
        self._num_errors = 0
        self.stopping = False

    def run(self) -> Progress:
        """Answer every row that has no answer yet; returns how it went. Stops after a step once `stopping` is set."""
        rows = ((row, *line) for row, line in enumerate(read_lines(self._source)) if not self._journal.has(row))
        self._go_on(rows, self._journal.add)
        return self.progress()

    def retry_errors(self) -> Progress:
        """Run the rows again that failed in a finished output, and put their new answers in place."""
        failed = set(self._journal.rows_where(is_failure))
        rows = ((row, *line) for row, line in enumerate(read_lines(self._source)) if row in failed)
        answers: dict[int, dict[str, Any]] = {}
        self._go_on(rows, answers.__setitem__)
        if answers:
            self._journal.replace(answers)
        return self.progress()

    def progress(self) -> Progress:
        """How far the job is now."""
        written, waiting = self._journal.num_written, self._journal.num_waiting
        seconds = time.monotonic() - self._started
        total = int(self._journal.manifest["rows"])
        return Progress(total, written + waiting, self._num_new, self._num_errors, seconds, self._llm.engine.stats())

    def _go_on(self, rows: Iterator[tuple[int, int, bytes]], keep: Callable[[int, dict[str, Any]], None]) -> None:
        engine = self._llm.engine
        most = 2 * engine.options.max_num_seqs
        try:
            while not self.stopping:
                while not self._pending or self._has_room(most):
                    upcoming = next(rows, None)
                    if upcoming is None:
                        break
                    self._submit(*upcoming, keep)
                if not self._pending:
                    break
                for result in engine.step():
                    self._collect(result, keep)
                if self._report is not None:
                    self._report(self.progress())
        finally:
            for request_id in list(self._pending):
                engine.abort(request_id)
            self._pending.clear()

    def _has_room(self, most: int) -> bool:
        """Whether to read another row: the engine wants some, and not too many answers wait for an earlier one."""
        return len(self._pending) < most and len(self._pending) + self._journal.num_waiting < self._window

    def _submit(self, row: int, number: int, line: bytes, keep: Callable[[int, dict[str, Any]], None]) -> None:
        request_id = f"line-{number}"
        try:
            parsed = parse(line, number, self._base)
            prompt = parsed.prompt if parsed.messages is None else self._llm.chat_prompt(parsed.messages)
            self._llm.engine.add_request(request_id, prompt, parsed.params, priority=parsed.priority)
        except (BadLine, InvalidRequest) as error:
            self._num_new += 1
            self._num_errors += 1
            keep(row, failure(number, str(error), raw=line))
        else:
            self._pending[request_id] = (row, parsed)

    def _collect(self, result: RequestOutput, keep: Callable[[int, dict[str, Any]], None]) -> None:
        if not result.finished or result.request_id not in self._pending:
            return
        row, parsed = self._pending.pop(result.request_id)
        line = answer(parsed, result)
        self._num_new += 1
        self._num_errors += is_failure(line)
        keep(row, line)
