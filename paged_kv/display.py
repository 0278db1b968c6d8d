"""How a batch job looks on a screen: one line while it runs, a table at its end.

Owns: the wording and units of progress.
Does not know: terminals; the command line prints what is built here.
"""

from __future__ import annotations

from rich.table import Table

from paged_kv.integrations.batch import Progress


def progress_line(progress: Progress) -> str:
    """How far a job is, in one line."""
    stats, seconds = progress.engine, max(progress.seconds, 1e-9)
    rate_in = (stats.num_computed_tokens - stats.num_output_tokens) / seconds
    hits = stats.num_cached_tokens / max(1, stats.num_prompt_tokens)
    return (
        f"{progress.num_done}/{progress.num_rows} rows, {progress.num_errors} errors | {rate_in:.0f} tokens/s in, "
        f"{stats.num_output_tokens / seconds:.0f} out | {stats.num_running} running, {stats.num_waiting} waiting | "
        f"pages {stats.pages_used}/{stats.pages_total}, prefix hits {hits:.0%} | {_left(progress)}"
    )


def _left(progress: Progress) -> str:
    """How long the rest will take at the pace of this run."""
    if not progress.num_new:
        return "no row done yet"
    seconds = (progress.num_rows - progress.num_done) * progress.seconds / progress.num_new
    if seconds < 100:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min left"


def summary(progress: Progress) -> Table:
    """What a job did."""
    stats, seconds = progress.engine, max(progress.seconds, 1e-9)
    table = Table("", "", show_header=False, title="paged-kv run")
    table.add_row("rows", f"{progress.num_done} of {progress.num_rows}, {progress.num_errors} errors in this run")
    if stats.num_output_tokens:
        computed = f"{stats.num_output_tokens} in {seconds:.1f} s"
        table.add_row("output tokens/s", f"{stats.num_output_tokens / seconds:.1f} ({computed})")
        table.add_row("prompt tokens", f"{stats.num_prompt_tokens}, {stats.num_cached_tokens} from the prefix cache")
        table.add_row("peak pages", f"{stats.peak_pages} of {stats.pages_total}")
        held, dynamic = stats.peak_bytes, stats.peak_dynamic_bytes
        share = f"{held / dynamic:.0%}" if dynamic else ""
        table.add_row("KV bytes held", f"{_mib(held)}; DynamicCache would hold {_mib(dynamic)} unpadded ({share})")
        table.add_row("live tokens per layer", _per_layer(stats.mean_live_len))
        table.add_row("pages freed by cropping", str(stats.pages_freed_by_crops))
        table.add_row("preemptions", str(stats.num_preemptions))
    return table


def _per_layer(lens: tuple[float, ...]) -> str:
    """Mean live tokens of a row, layer by layer, and their mean."""
    if not lens:
        return "none"
    shown = " ".join(f"{value:.0f}" for value in lens)
    return f"mean {sum(lens) / len(lens):.0f} at the end of a row; layer by layer: {shown}"


def _mib(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"
