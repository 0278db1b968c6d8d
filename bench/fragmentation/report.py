"""Tables of a finished grid: JSON, CSV, Markdown. What depends on the machine goes into files of its own."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from bench.fragmentation.grid import Plan
from bench.fragmentation.schemes import SCHEMES
from bench.fragmentation.shape import Shape
from bench.fragmentation.workloads import fit_table

__all__ = ["markdown_table", "select", "write_tables"]

Result = dict[str, Any]

FIGURES = (
    ("live_pct", "live %", 1),
    ("held_pct", "held %", 1),
    ("internal_pct", "internal %", 1),
    ("reservation_pct", "reserved %", 1),
    ("imbalance_pct", "imbalance %", 1),
    ("external_pct", "external %", 1),
    ("batch_mean", "batch", 1),
    ("batch_p5", "batch p5", 0),
    ("admitted_per_step", "admitted/step", 3),
    ("preemptions", "preempted", 0),
    ("recomputed_tokens", "recomputed", 0),
    ("refused", "refused", 0),
    ("table_bytes", "table bytes", 0),
    ("contiguity_pct", "contiguity %", 1),
    ("free_superpages_pct", "free superpages %", 1),
)


def select(results: list[Result], **wanted: Any) -> list[Result]:
    """Results whose cell has the given values, in their order."""
    return [result for result in results if all(result["cell"][name] == value for name, value in wanted.items())]


def at_default_page(results: list[Result]) -> list[Result]:
    """Results at the page size of the main table: 16 tokens, 256 for transformers' own cache."""
    return [
        result
        for result in results
        if result["cell"]["page_size"] == (256 if result["cell"]["scheme"] == "transformers-paged" else 16)
    ]


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def figure_rows(results: list[Result]) -> list[dict[str, Any]]:
    """The main table of some results: a row a scheme."""
    rows = []
    for result in results:
        figures = result["figures"]
        row: dict[str, Any] = {"scheme": SCHEMES[result["cell"]["scheme"]].title}
        for name, title, digits in FIGURES:
            value = figures.get(name)
            row[title] = "" if value is None else f"{value:,.{digits}f}"
        rows.append(row)
    return rows


def write_tables(plan: Plan, results: list[Result], timings: list[Result], out: Path, *, seed: int) -> str:
    """Write `results.json`, `results.csv`, `report.md`, `timings.csv` and `timings.json`; returns the Markdown."""
    slim = [{"cell": result["cell"], "figures": result["figures"]} for result in results]
    _write(out / "results.json", json.dumps(slim, indent=1, sort_keys=True) + "\n")
    _write_csv(out / "results.csv", [{**result["cell"], **result["figures"]} for result in slim])
    _write_csv(out / "timings.csv", timings)
    _write(out / "timings.json", json.dumps(timings, indent=1, sort_keys=True) + "\n")
    text = _markdown(plan, results, seed)
    _write(out / "report.md", text)
    return text


def _markdown(plan: Plan, results: list[Result], seed: int) -> str:
    shape = Shape(layers=plan.layers)
    parts = [
        "# KV memory by scheme",
        f"{plan.layers} layers, {shape.heads} KV heads, {shape.pool_bytes / 2**30:.0f} GiB for K and V "
        f"(room for {shape.pool_tokens:,} uncropped tokens) in every row; {plan.requests} requests; seed {seed}. "
        "Shares are of the pool, means over the steps in which a request waits for memory. "
        "Every kind of waste is defined in `allocator/waste.py`.",
    ]
    combos = dict.fromkeys((r["cell"]["workload"], r["cell"]["schedule"], r["cell"]["load"]) for r in results)
    for workload, schedule, load in combos:
        rows = at_default_page(select(results, workload=workload, schedule=schedule, load=load))
        if rows:
            when = "backlog" if load is None else f"load {load}"
            parts += [f"## {workload}, schedule {schedule}, {when}", markdown_table(figure_rows(rows))]
            parts += [_ratios(rows)] if _ratios(rows) else []
    sizes = _page_size_rows(select(results, workload=plan.primary, schedule="pyramid", load=None))
    if sizes:
        parts += ["## Waste inside pages, by page size (% of the pool; batch)", markdown_table(sizes)]
    parts += ["## What each row models", markdown_table(_sources())]
    parts += ["## Fit of the synthetic lengths: drawn (wanted)", markdown_table(fit_table(seed))]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _ratios(rows: list[Result]) -> str:
    batch = {row["cell"]["scheme"]: row["figures"]["batch_mean"] for row in rows}
    ours = batch.get("ours-per-layer")
    others = {key: batch.get(key) for key in ("group-tables", "private-pools", "transformers-paged", "dynamic-cache")}
    said = [f"{ours / value:.2f} x {SCHEMES[key].title}" for key, value in others.items() if ours and value]
    return "Batch of paged-kv per layer: " + ", ".join(said) + "." if said else ""


def _page_size_rows(results: list[Result]) -> list[dict[str, Any]]:
    sizes = sorted({result["cell"]["page_size"] for result in results})
    rows = []
    for scheme in dict.fromkeys(
        result["cell"]["scheme"] for result in results if SCHEMES[result["cell"]["scheme"]].paged
    ):
        by_size = {r["cell"]["page_size"]: r["figures"] for r in select(results, scheme=scheme)}
        if len(by_size) > 1:
            row: dict[str, Any] = {"scheme": SCHEMES[scheme].title}
            for size in sizes:
                figures = by_size.get(size)
                row[str(size)] = f"{figures['internal_pct']:.2f} ({figures['batch_mean']:.1f})" if figures else ""
            rows.append(row)
    return rows


def _sources() -> list[dict[str, str]]:
    return [
        {"row": scheme.title, "models": scheme.models, "checked against": scheme.checked} for scheme in SCHEMES.values()
    ]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
