"""Which cells are run, and running them: in parallel, resumable, one small file a cell."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.fragmentation.schedules import SCHEDULES, make_schedule
from bench.fragmentation.shape import Shape
from bench.fragmentation.simulate import simulate
from bench.fragmentation.workloads import Workload, make_workload, read_trace

__all__ = ["Cell", "Plan", "full_plan", "load_cells", "quick_plan", "run_plan"]

VERSION = 1  # raise it when figures of finished cells would change: they are run again
PAGE_SIZES = (16, 32, 64, 128, 256)
LOADS = (0.5, 0.8, 0.95)
SCHEME_KEYS = (
    "contiguous-max", "buddy", "contiguous-exact", "static-cache", "dynamic-cache", "transformers-paged",
    "group-tables", "private-pools", "ours-lockstep", "ours-per-layer", "ours-per-head", "ours-runs",
)  # fmt: skip
PAGED_KEYS = ("transformers-paged", "group-tables", "private-pools", "ours-lockstep", "ours-per-layer", "ours-runs")
TRANSFORMERS_PAGE = 256  # its default


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: everything that its figures depend on.

    Attributes:
        load: offered load, None for a backlog.
        trace: path of the trace; empty for a synthetic workload of that name.
        digest: of the trace's content.
    """

    scheme: str
    schedule: str
    workload: str
    load: float | None
    page_size: int
    requests: int
    layers: int
    seed: int
    trace: str = ""
    digest: str = ""

    @property
    def key(self) -> str:
        """File name of its result: readable, and different for different cells."""
        facts = {**asdict(self), "trace": "", "version": VERSION}
        short = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
        load = "backlog" if self.load is None else f"load{self.load}"
        return f"{self.workload}-{self.schedule}-{load}-p{self.page_size}-{self.scheme}-{short}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells to run, and the workload and schedule that the report shows first."""

    cells: tuple[Cell, ...]
    primary: str
    requests: int
    layers: int


def _sources(traces: Iterable[Path], synthetic: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(workload, trace path, digest) in the order of the report; synthetic ones where no trace is given."""
    given = [
        (path.stem, str(path), hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "")
        for path in traces
    ]
    made = [(name, "", "") for name in synthetic if not given or name in ("staggered", "sawtooth")]
    return given + made


def quick_plan(traces: Iterable[Path], *, seed: int, only: Iterable[str] | None = None) -> Plan:
    """Under a minute: eight layers, one workload, two schedules, and a look at page sizes."""
    return _plan(_sources(traces, ("chat",))[:1], ("none", "pyramid"), requests=240, layers=8, seed=seed,
                 page_sizes=(64, 256), loads=(), others=(), only=only)  # fmt: skip


def full_plan(traces: Iterable[Path], *, seed: int, requests: int = 2000, only: Iterable[str] | None = None) -> Plan:
    """The whole grid: every schedule on the first workload, the others plain and with a pyramid, sizes and loads."""
    sources = _sources(traces, ("chat", "code", "long", "staggered", "sawtooth"))
    return _plan(sources, SCHEDULES, requests=requests, layers=32, seed=seed, page_sizes=PAGE_SIZES, loads=LOADS,
                 others=("none", "pyramid"), only=only)  # fmt: skip


def _plan(  # noqa: PLR0913 - the axes of the grid
    sources: list[tuple[str, str, str]], schedules: tuple[str, ...], *, requests: int, layers: int, seed: int,
    page_sizes: tuple[int, ...], loads: tuple[float, ...], others: tuple[str, ...], only: Iterable[str] | None,
) -> Plan:  # fmt: skip
    schemes = [key for key in SCHEME_KEYS if only is None or key in set(only)]
    cells: dict[Cell, None] = {}

    def add(scheme: str, schedule: str, source: tuple[str, str, str], *, load: float | None = None, page: int = 16):
        name, trace, digest = source
        cells[Cell(scheme, schedule, name, load, page, requests, layers, seed, trace, digest)] = None

    def default_page(scheme: str) -> int:
        return TRANSFORMERS_PAGE if scheme == "transformers-paged" else 16

    first, *rest = sources
    for schedule in schedules:
        for scheme in schemes:
            add(scheme, schedule, first, page=default_page(scheme))
    for page in page_sizes:
        for scheme in (key for key in schemes if key in PAGED_KEYS):
            add(scheme, "pyramid", first, page=page)
    for load in loads:
        for scheme in schemes:
            add(scheme, "pyramid", first, load=load, page=default_page(scheme))
    for source in rest:
        for schedule in others:
            for scheme in schemes:
                add(scheme, schedule, source, page=default_page(scheme))
    return Plan(tuple(cells), first[0], requests, layers)


def _single_thread() -> None:
    """Tensors here are small: two threads that wait for each other cost more than they bring."""
    import torch

    torch.set_num_threads(1)


def run_cell(cell: Cell) -> tuple[dict[str, Any], dict[str, float]]:
    """The result of one cell, ready for JSON: what depends on its inputs alone, and what depends on the machine."""
    from bench.fragmentation.schemes import SCHEMES

    workload = _workload(cell)
    base = Shape(layers=cell.layers, page_size=cell.page_size)
    shape = replace(base, model_max=max(4096, 1 << math.ceil(math.log2(workload.longest))))
    schedule = make_schedule(cell.schedule, shape)
    scheme = SCHEMES[cell.scheme](shape, schedule)
    arrivals = workload.arrival_steps(cell.load, shape.pool_tokens)
    outcome = simulate(scheme, workload, schedule, shape, arrivals, seed=cell.seed)
    facts = {**asdict(cell), "trace": Path(cell.trace).name}
    result = {
        "cell": facts,
        "figures": outcome.figures,
        "series": {name: [round(value, 5) for value in values] for name, values in outcome.series.items()},
        "layers": [[round(value, 6) for value in row] for row in outcome.layers[:: max(1, len(outcome.layers) // 200)]],
        "runs": [round(value, 5) for value in outcome.runs],
    }
    return result, outcome.timing


def _workload(cell: Cell) -> Workload:
    if cell.trace:
        return read_trace(Path(cell.trace), limit=cell.requests)
    return make_workload(cell.workload, cell.requests, seed=cell.seed)


def run_plan(plan: Plan, out: Path, *, jobs: int, progress: Callable[[Cell | None, int, int], None]) -> None:
    """Run the cells that `out` does not hold yet.

    Args:
        plan: the cells.
        out: folder; results go to `cells/`, timings to `timings/`.
        jobs: processes.
        progress: called with the cell that was finished (None for those that were there), how many are done, and
            how many there are.
    """
    folders = {name: out / name for name in ("cells", "timings")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in plan.cells if not (folders["cells"] / f"{cell.key}.json").is_file()]
    done = len(plan.cells) - len(missing)
    progress(None, done, len(plan.cells))

    def store(cell: Cell, result: dict[str, Any], timing: dict[str, float]) -> None:
        nonlocal done
        _write(folders["timings"] / f"{cell.key}.json", timing)
        _write(folders["cells"] / f"{cell.key}.json", result)
        done += 1
        progress(cell, done, len(plan.cells))

    if jobs <= 1:
        _single_thread()
        for cell in missing:
            store(cell, *run_cell(cell))
        return
    with ProcessPoolExecutor(max_workers=jobs, initializer=_single_thread) as pool:
        futures = {pool.submit(run_cell, cell): cell for cell in missing}
        try:
            for future in as_completed(futures):
                store(futures[future], *future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def load_cells(plan: Plan, out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results and timings of a finished plan, in the plan's order."""
    results, timings = [], []
    for cell in plan.cells:
        results.append(json.loads((out / "cells" / f"{cell.key}.json").read_text()))
        timing = json.loads((out / "timings" / f"{cell.key}.json").read_text())
        timings.append({**results[-1]["cell"], **{name: round(value, 1) for name, value in timing.items()}})
    return results, timings


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(value, sort_keys=True), encoding="utf-8")
    os.replace(partial, path)
