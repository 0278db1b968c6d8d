"""The engine's statistics in Prometheus' text format.

Owns: names, types and help of the metrics.
Does not know: HTTP; serve the text from whatever serves.
"""

from __future__ import annotations

from paged_kv.engine.stats import EngineStats

_METRICS = (
    ("num_running", "gauge", "running_rows", "Rows that run now."),
    ("num_waiting", "gauge", "waiting_rows", "Rows that wait for pages or seats."),
    ("pages_used", "gauge", "pages_used", "Pages in use."),
    ("pages_total", "gauge", "pages_total", "Pages of the pool."),
    ("num_steps", "counter", "steps_total", "Forward passes."),
    ("num_prompt_tokens", "counter", "prompt_tokens_total", "Tokens of all prompts taken."),
    (
        "num_cached_tokens",
        "counter",
        "cached_tokens_total",
        "Prompt tokens of ended requests found in the prefix cache.",
    ),
    ("num_computed_tokens", "counter", "computed_tokens_total", "Tokens computed, recomputed ones included."),
    ("num_output_tokens", "counter", "output_tokens_total", "Tokens generated."),
    ("num_preemptions", "counter", "preemptions_total", "Rows that gave their pages back and were recomputed."),
    ("pages_freed_by_crops", "counter", "cropped_pages_total", "Pages that crops gave back."),
)


def prometheus(stats: EngineStats, *, prefix: str = "paged_kv_") -> str:
    """The metrics as text, one block each."""
    lines = []
    for field, kind, name, text in _METRICS:
        lines += [
            f"# HELP {prefix}{name} {text}",
            f"# TYPE {prefix}{name} {kind}",
            f"{prefix}{name} {getattr(stats, field)}",
        ]
    return "\n".join(lines) + "\n"
