"""The command: the same files for the same seed, results kept between runs, errors that say where."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.fragmentation import grid
from bench.fragmentation.__main__ import main
from bench.fragmentation.grid import Cell, Plan, full_plan, load_cells, quick_plan, run_plan
from bench.fragmentation.schedules import make_schedule
from bench.fragmentation.schemes import SCHEMES
from bench.fragmentation.schemes.base import Request, State
from bench.fragmentation.shape import Shape

DETERMINISTIC = ("results.json", "results.csv", "report.md")


def _small(seed: int = 0, schemes: tuple[str, ...] = ("group-tables", "ours-per-layer")) -> Plan:
    plan = quick_plan([], seed=seed, only=schemes)
    return replace(plan, cells=tuple(replace(cell, requests=130) for cell in plan.cells), requests=130)


def _run(plan: Plan, out: Path) -> list[tuple[Cell | None, int]]:
    calls: list[tuple[Cell | None, int]] = []
    run_plan(plan, out, jobs=1, progress=lambda cell, done, total: calls.append((cell, done)))
    return calls


@pytest.mark.slow
def test_two_runs_with_one_seed_write_the_same_bytes_and_a_third_resumes(tmp_path: Path):
    from bench.fragmentation.report import write_tables

    plan = _small()
    for name in ("first", "second"):
        _run(plan, tmp_path / name)
        write_tables(plan, *load_cells(plan, tmp_path / name), tmp_path / name, seed=0)
    for name in DETERMINISTIC:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert "step_us" not in (tmp_path / "first" / "results.csv").read_text()
    victim = next((tmp_path / "first" / "cells").iterdir())
    victim.unlink()
    calls = _run(plan, tmp_path / "first")
    assert [done for _, done in calls] == [len(plan.cells) - 1, len(plan.cells)]
    assert calls[0][0] is None


@pytest.mark.slow
def test_the_pictures_and_the_page_are_drawn_and_load_nothing(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from bench.fragmentation.html import write_html
    from bench.fragmentation.pictures import draw_all
    from bench.fragmentation.report import write_tables

    plan = _small(schemes=("contiguous-exact", "group-tables", "ours-per-layer", "ours-runs"))
    _run(plan, tmp_path)
    results, timings = load_cells(plan, tmp_path)
    text = write_tables(plan, results, timings, tmp_path, seed=0)
    drawn = draw_all(plan, results, tmp_path)
    assert {path.stem for _, path in drawn} == {
        "waste-none", "waste-pyramid", "utilisation", "batch", "page-size", "layers", "contiguity",
    }  # fmt: skip
    first = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    draw_all(plan, results, tmp_path)
    assert first == {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert all((tmp_path / f"{path.stem}.png").is_file() for _, path in drawn)
    page = write_html(tmp_path, text, drawn).read_text()
    assert page.count("<svg") == len(drawn)
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # data: the heat map's pixels
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_bad_trace_ends_with_the_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "bad.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,12,x\n")
    assert main(["--quick", "--out", str(tmp_path / "out"), "--trace", str(trace)]) == 2
    assert "bad.csv, line 2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_full_grid_covers_every_axis():
    plan = full_plan([], seed=0)
    axes = {name: {getattr(cell, name) for cell in plan.cells} for name in ("scheme", "schedule", "load", "page_size")}
    assert axes["scheme"] == set(SCHEMES)
    assert len(axes["schedule"]) == 9
    assert axes["load"] == {None, 0.5, 0.8, 0.95}
    assert axes["page_size"] == {16, 32, 64, 128, 256}
    assert {cell.workload for cell in plan.cells} == {"chat", "code", "long", "staggered", "sawtooth"}
    assert len({cell.key for cell in plan.cells}) == len(plan.cells)


def test_a_trace_takes_the_place_of_the_synthetic_lengths(tmp_path: Path):
    trace = tmp_path / "mine.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,12,3\n")
    plan = full_plan([trace], seed=0)
    assert plan.primary == "mine"
    assert {cell.workload for cell in plan.cells} == {"mine", "staggered", "sawtooth"}
    digest = plan.cells[0].digest
    trace.write_text(trace.read_text() + "2023-11-16 18:15:47.68,12,3\n")
    assert full_plan([trace], seed=0).cells[0].digest != digest


def test_the_scheme_lists_agree():
    assert tuple(SCHEMES) == grid.SCHEME_KEYS
    assert {key for key, scheme in SCHEMES.items() if scheme.paged} == {*grid.PAGED_KEYS, "ours-per-head"}


@pytest.mark.parametrize("key", ["ours-lockstep", "ours-per-layer", "ours-per-head", "ours-runs"])
def test_our_rows_agree_with_what_the_allocator_measures_of_itself(key: str):
    shape = Shape(layers=5, heads=2, pool_tokens=4096)
    schedule = make_schedule("pyramid", shape)
    scheme = SCHEMES[key](shape, schedule)
    state = State.empty(6, shape.layers, 1)
    for slot, prompt in enumerate((100, 33, 16, 1, 250, 77)):
        live = schedule.after_prefill(prompt, shape, np.random.default_rng(0))
        scheme.admit(slot, Request(slot, prompt, 10), live)
        state.seen[slot], state.final[slot], state.live[slot] = prompt, prompt + 10, live
    scheme.release(2)
    slots = np.array([0, 1, 3, 4, 5])
    ours = scheme.waste(slots, state, None)
    measured = scheme.allocator.fragmentation().waste  # type: ignore[attr-defined]
    unit = scheme.page_unit // shape.page_size  # heads a row stands for
    assert measured.pool * unit == ours.pool
    assert measured.live * unit == ours.live + ours.imbalance  # an allocator knows what rows hold, not what they need
    assert measured.internal * unit == ours.internal
    assert measured.free * unit == ours.free
