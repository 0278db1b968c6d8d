"""The command line: `paged-kv run`, `inspect` and `doctor`. The only place that prints or reads the environment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from paged_kv.engine.llm import LLM
    from paged_kv.engine.params import SamplingParams
    from paged_kv.integrations.batch import BatchJob, Progress

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A paged KV cache for Hugging Face models. PAGED_KV_CACHE names the folder that the demo model is kept in "
    "(~/.cache/paged-kv by default).",
)
_err = Console(stderr=True, highlight=False, soft_wrap=True)
_out = Console(highlight=False)

#: Seconds between two plain progress lines.
PLAIN_INTERVAL = 10.0


def _version(asked: bool) -> None:
    if asked:
        import paged_kv

        _out.print(f"paged-kv {paged_kv.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """A paged KV cache for Hugging Face models."""


@app.command()
def run(  # noqa: PLR0913 - one parameter per option of the command
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSON lines: short form, or OpenAI's batch form.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the answers go, one line each, in order.")],
    model: Annotated[str, typer.Option(help="Folder of a transformers model; SmolLM2 by default.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; as saved by default.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Output tokens of lines that name none.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of lines that name none; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Draws of a line depend on this and its number.")] = 0,
    budget: Annotated[int, typer.Option(help="Tokens a layer keeps of a prompt, mean over layers; 0 keeps all.")] = 0,
    policy: Annotated[
        str, typer.Option(help="Which tokens stay: streaming, knorm, snapkv, tova, h2o or lagkv.")
    ] = "streaming",
    spread: Annotated[float, typer.Option(help="First layer keeps 1 + spread of the budget, last 1 - spread.")] = 0.5,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of one forward pass.")] = 1024,
    kv_cache_bytes: Annotated[int, typer.Option(help="Bytes of KV cache; 0 for as much as is free.")] = 0,
    backend: Annotated[str, typer.Option(help="Attention backend: auto, cpu or sdpa.")] = "auto",
    prefix_caching: Annotated[bool, typer.Option(help="Share the pages of equal prefixes.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over if the output exists.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Run failed lines again.")] = False,
) -> None:
    """Complete every line of INPUT. Run the same command again to go on after an interruption.

    Ends with status 0 when all rows have an answer (a row that failed says so in its line), 1 when every row failed, 2
    when the job cannot start or go on, 130 after Ctrl-C.
    """
    from paged_kv.engine import SamplingParams

    settings = {
        "page_size": page_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_bytes": kv_cache_bytes or None,
        "backend": backend,
        "enable_prefix_caching": prefix_caching,
    }
    with _clear_errors():
        if budget < 0:
            raise ValueError(f"--budget must be at least 0 tokens, got {budget}")
        base = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        named = {"budget": budget, "policy": policy if budget else "", "spread": spread if budget else 0.0}
        is_new = not output.exists()
        opened = _open(source, output, base, {"model": model, "dtype": dtype} | named, overwrite)
        if opened.is_complete and not retry_errors:
            _err.print("nothing is left to do; --overwrite computes all rows again, --retry-errors those that failed")
            opened.close()
            return
        with _unclaimed(output, is_new), _llm(model, dtype, settings) as llm:
            base = _with_budget(base, llm, named)
            _work(llm, source, opened, base, retry_errors)


@app.command()
def inspect(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="A file that PagedCache.save wrote.")],
    html: Annotated[Path | None, typer.Option(help="Draw to one HTML file instead of the terminal.")] = None,
) -> None:
    """Draw who holds which pages of a saved cache: by layer and row, shared and free."""
    from paged_kv.memory_map import map_of, render_html, render_text
    from paged_kv.persist import load

    with _clear_errors():
        batch = load(cache)
        maps = map_of(batch.memory, {f"row {row}": seq for row, seq in enumerate(batch.seqs)})
        if html is not None:
            html.write_text(render_html(maps, title=cache.name))
    for chart in maps if html is None else ():
        _out.print(render_text(chart))


@app.command()
def doctor(
    build: Annotated[bool, typer.Option("--build", help="Compile the CPU kernel now, ahead of its first use.")] = False,
) -> None:
    """Say what this machine and its packages can do, and which attention backend runs here and why."""
    import platform

    import psutil
    import torch
    import transformers

    import paged_kv
    from paged_kv.attention import select
    from paged_kv.attention.cpu.build import KernelUnavailable

    if build:
        try:
            _out.print(f"built {select.build()}")
        except KernelUnavailable as error:
            _err.print(f"[red]error:[/red] {escape(str(error))}")
            raise typer.Exit(2) from error
    table = Table("", "", show_header=False, box=None)
    table.add_row("paged-kv", paged_kv.__version__)
    table.add_row("python", platform.python_version())
    level = torch.backends.cpu.get_cpu_capability()
    table.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {level}")
    table.add_row("transformers", transformers.__version__)
    memory = psutil.virtual_memory()
    table.add_row("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table.add_row("GPUs", ", ".join(gpus) or "none")
    device = torch.device("cuda" if gpus else "cpu")
    for name, works, reason in select.available_backends(device):
        table.add_row(f"attention: {name}", "works" if works else f"no: {reason}")
    table.add_row("attention: auto", select.pick_backend(device).name)
    packed = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    table.add_row("packed weights", "works" if packed else "no: this torch is built without oneDNN")
    for package, use in (("kvpress", "its presses as policies"), ("llguidance", "structured output")):
        table.add_row(package, _found(package, use))
    _out.print(table)


def main() -> None:
    """Run the command line."""
    app()


# -- parts of `run` ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Print an expected failure as one line and end with status 2."""
    from allocator import KVError

    try:
        yield
    except (KVError, ValueError, OSError) as error:
        _err.print(f"[red]error:[/red] {escape(str(error) or type(error).__name__)}")
        raise typer.Exit(2) from error


@contextlib.contextmanager
def _unclaimed(output: Path, is_new: bool) -> Iterator[None]:
    """Remove the files of a new job that failed before its first row, so that a corrected command can start over."""
    try:
        yield
    except (Exception, SystemExit):
        if is_new and output.exists() and output.stat().st_size == 0:
            output.unlink()
            output.with_name(output.name + ".manifest.json").unlink(missing_ok=True)
        raise


def _open(source: Path, output: Path, base: SamplingParams, settings: dict[str, Any], overwrite: bool) -> Any:
    """The journal of the job, before anything expensive is loaded."""
    from paged_kv.integrations.batch import manifest_of
    from paged_kv.integrations.journal import Journal, fingerprint

    digest, rows = fingerprint(source)
    model = settings.pop("model") or "SmolLM2-135M-Instruct"
    journal = Journal(output, manifest_of(digest, rows, model, base, settings))
    journal.open(source, overwrite=overwrite)
    if journal.num_written:
        _err.print(f"{output}: {journal.num_written} of {rows} rows are done already")
    return journal


def _llm(model: str, dtype: str, settings: dict[str, Any]) -> LLM:
    """Load the model and open an engine."""
    import torch
    from transformers.utils import logging

    from paged_kv.engine.llm import LLM
    from paged_kv.weights import demo_model

    if dtype and dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    logging.disable_progress_bar()
    cache = os.environ.get("PAGED_KV_CACHE")
    path = model or demo_model(Path(cache) if cache else None)
    return LLM(path, dtype=getattr(torch, dtype) if dtype else None, **settings)


def _with_budget(base: SamplingParams, llm: LLM, named: dict[str, Any]) -> SamplingParams:
    """Parameters that crop each prompt to the budget, if there is one."""
    from dataclasses import replace

    from paged_kv.compression import H2O, TOVA, KeyNorm, LagKV, SnapKV, StreamingLLM
    from paged_kv.engine.compress import Compression, ramp

    if not named["budget"]:
        return base
    budgets = ramp(named["budget"], len(llm.engine.memory.layers), named["spread"])
    window = max(1, min(32, min(budgets) // 2))  # tokens that are kept for their age leave room for chosen ones
    policies: dict[str, Any] = {
        "streaming": StreamingLLM(),
        "knorm": KeyNorm(),
        "snapkv": SnapKV(window=window),
        "tova": TOVA(),
        "h2o": H2O(recent=window),
        "lagkv": LagKV(),
    }
    if named["policy"] not in policies:
        raise ValueError(f"policy must be one of {', '.join(policies)}, got {named['policy']!r}")
    return replace(base, compression=Compression(policies[named["policy"]], budgets))


def _work(llm: LLM, source: Path, journal: Any, base: SamplingParams, retry_errors: bool) -> None:
    """Run the job with progress, and say how it went."""
    from paged_kv.display import summary
    from paged_kv.integrations.batch import BatchJob

    with _progress() as report:
        job = BatchJob(llm, source, journal, base, report=report)
        with _stopping_on_interrupt(job):
            try:
                progress = job.run()
                if retry_errors and not job.stopping:
                    progress = job.retry_errors()
            finally:
                journal.close()
    _out.print(summary(progress))
    if job.stopping:
        _err.print(f"stopped: {progress.num_done} of {progress.num_rows} rows are done; the same command goes on")
        raise typer.Exit(130)
    if progress.num_errors and progress.num_errors == progress.num_new:
        _err.print(
            f"[red]error:[/red] every row of this run failed; {escape(str(journal.path))} says why, line by line"
        )
        raise typer.Exit(1)


@contextlib.contextmanager
def _stopping_on_interrupt(job: BatchJob) -> Iterator[None]:
    """Ctrl-C ends the job after its step; a second one ends it at once."""

    def stop(signum: int, frame: Any) -> None:
        if job.stopping:
            raise KeyboardInterrupt
        job.stopping = True
        _err.print("stopping after this step (again to stop at once)")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A function that shows progress: a live line on a terminal, a plain one now and then elsewhere."""
    from paged_kv.display import progress_line

    last = time.monotonic()
    if not sys.stderr.isatty():

        def plain(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_INTERVAL:
                last = time.monotonic()
                _err.print(progress_line(progress), markup=False)

        yield plain
        return
    with _err.status("starting") as status:

        def live(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= 0.2:
                last = time.monotonic()
                status.update(escape(progress_line(progress)))

        yield live


def _found(package: str, use: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return f"not installed ({use})"


if __name__ == "__main__":
    main()
