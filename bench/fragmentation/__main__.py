"""The command line of the fragmentation benchmark."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.fragmentation.grid import SCHEME_KEYS, Cell, Plan, full_plan, load_cells, quick_plan, run_plan
from bench.fragmentation.workloads import TraceError, fit_table, read_trace

console = Console()


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments ask for. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        for trace in options.trace:
            read_trace(trace)
    except TraceError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before a worker imports torch
    if options.real:
        from bench.fragmentation.real import run_real

        return run_real(options.out, options.trace, seed=options.seed, console=console)
    make = quick_plan if options.quick else full_plan
    extra = {} if options.quick else {"requests": options.requests}
    plan = make(options.trace, seed=options.seed, only=_available(options.only), **extra)
    begin = time.monotonic()
    _run(plan, options.out, options.jobs)
    _report(plan, options.out, seed=options.seed, pictures=not options.no_pictures)
    console.print(f"{len(plan.cells)} cells in {time.monotonic() - begin:.0f} s; see {options.out / 'index.html'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.fragmentation", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/fragmentation"), help="folder for results")
    parser.add_argument("--quick", action="store_true", help="a small grid, in under a minute")
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="Azure CSV or Mooncake JSONL; repeatable"
    )
    parser.add_argument("--requests", type=int, default=2000, help="requests a cell of the full grid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", nargs="+", choices=SCHEME_KEYS, help="run these schemes only")
    parser.add_argument("--no-pictures", action="store_true", help="tables only; does not need matplotlib")
    parser.add_argument(
        "--real", action="store_true", help="drive the real engine and compare measured with predicted bytes"
    )
    return parser


def _available(only: list[str] | None) -> list[str]:
    from bench.fragmentation.schemes.hf import unavailable

    wanted = list(only or SCHEME_KEYS)
    reason = unavailable()
    if reason and "transformers-paged" in wanted:
        console.print(f"without transformers' own cache: {reason}")
        wanted.remove("transformers-paged")
    return wanted


def _run(plan: Plan, out: Path, jobs: int) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("cells", total=len(plan.cells))

        def show(cell: Cell | None, done: int, total: int) -> None:
            name = "resumed" if cell is None else f"{cell.workload} {cell.schedule} {cell.scheme}"
            bar.update(task, completed=done, total=total, description=f"{name:<45.45}")

        run_plan(plan, out, jobs=jobs, progress=show)


def _report(plan: Plan, out: Path, *, seed: int, pictures: bool) -> None:
    from bench.fragmentation.report import at_default_page, figure_rows, markdown_table, select, write_tables

    results, timings = load_cells(plan, out)
    text = write_tables(plan, results, timings, out, seed=seed)
    console.print("Fit of the synthetic lengths: drawn (wanted), and the largest gap between the two distributions")
    console.print(Markdown(markdown_table(fit_table(seed))))
    main_rows = at_default_page(select(results, workload=plan.primary, schedule="pyramid", load=None))
    narrow = [
        {k: row[k] for k in ("scheme", "live %", "held %", "batch", "preempted")} for row in figure_rows(main_rows)
    ]
    console.print(f"{plan.primary}, pyramid schedule, backlog")
    console.print(Markdown(markdown_table(narrow)))
    if pictures:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            console.print("no pictures: matplotlib is not installed (`pip install 'paged-kv[bench]'`)")
            return
        from bench.fragmentation.html import write_html
        from bench.fragmentation.pictures import draw_all

        write_html(out, text, draw_all(plan, results, out))


if __name__ == "__main__":
    sys.exit(main())
