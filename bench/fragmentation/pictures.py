"""The pictures of a finished grid, as PNG and SVG. Colours are told apart by colour-blind readers (Okabe and Ito)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.fragmentation.grid import Plan
from bench.fragmentation.report import Result, at_default_page, select
from bench.fragmentation.schemes import SCHEMES
from bench.fragmentation.shape import Shape

__all__ = ["draw_all"]

KINDS = (
    ("live_pct", "live tokens", "#009E73", ""),
    ("internal_pct", "internal: inside pages, rounding, padding", "#E69F00", ""),
    ("reservation_pct", "reservation: tokens to come, or never", "#0072B2", ""),
    ("imbalance_pct", "imbalance: tied to a longer layer", "#D55E00", "//"),
    ("external_pct", "external: no hole large enough", "#CC79A7", ".."),
    ("free_pct", "free", "#E5E5E5", ""),
)
LINES = {
    "contiguous-max": ("#999999", ":"),
    "contiguous-exact": ("#56B4E9", ":"),
    "dynamic-cache": ("#0072B2", "--"),
    "transformers-paged": ("#E69F00", "--"),
    "group-tables": ("#D55E00", "-."),
    "private-pools": ("#CC79A7", "-."),
    "ours-lockstep": ("#56B4E9", "-"),
    "ours-per-layer": ("#009E73", "-"),
    "ours-per-head": ("#0072B2", "-"),
    "ours-runs": ("#000000", "-"),
}
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "paged-kv",
    "svg.fonttype": "none",
    "legend.frameon": False,
}
SHORT = {
    "contiguous-max": "contiguous,\nmodel maximum",
    "buddy": "buddy",
    "contiguous-exact": "contiguous,\nexact (oracle)",
    "static-cache": "StaticCache",
    "dynamic-cache": "DynamicCache",
    "transformers-paged": "transformers\npaged (256)",
    "group-tables": "one table a group\n(vLLM-like)",
    "private-pools": "private pools\n(OpenVINO-like)",
    "ours-lockstep": "paged-kv,\nlayers alike",
    "ours-per-layer": "paged-kv,\nper layer",
    "ours-per-head": "paged-kv,\nper head",
    "ours-runs": "paged-kv,\nrun-aware",
}
SCHEDULE_TITLES = {
    "none": "nothing cropped",
    "pyramid": "layers keep 100 % down to 10 % of the prompt",
    "random": "random per layer and head",
    "window-5to1": "five window layers for each full one",
}


def draw_all(plan: Plan, results: list[Result], out: Path) -> list[tuple[str, Path]]:
    """Draw every picture that the results have data for; returns captions and SVG paths in the report's order."""
    mpl.use("Agg")
    drawn = []
    with mpl.rc_context(STYLE):
        for name, caption, figure in _figures(plan, results):
            for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
                figure.savefig(out / f"{name}.{suffix}", metadata=metadata, bbox_inches="tight")
            plt.close(figure)
            drawn.append((caption, out / f"{name}.svg"))
    return drawn


def _figures(plan: Plan, results: list[Result]) -> list[tuple[str, str, Figure]]:
    primary = [result for result in results if result["cell"]["workload"] == plan.primary]
    backlog = select(primary, load=None)
    figures = []
    for schedule in dict.fromkeys(result["cell"]["schedule"] for result in backlog):
        rows = at_default_page(select(backlog, schedule=schedule))
        about = f"{plan.primary}, {SCHEDULE_TITLES.get(schedule, schedule)}"
        figures.append((f"waste-{schedule}", f"Where the pool's slots are: {about}", waste_bars(rows, about)))
    pyramid = at_default_page(select(backlog, schedule="pyramid"))
    about = f"{plan.primary}, {SCHEDULE_TITLES['pyramid']}"
    figures.append(("utilisation", "Utilisation over time", utilisation(pyramid, about)))
    figures.append(("batch", "Sequences that run at once", batches(backlog, plan.primary)))
    sizes = select(backlog, schedule="pyramid")
    if len({result["cell"]["page_size"] for result in sizes}) > 2:
        figures.append(("page-size", "Waste by page size", page_sizes(sizes, about)))
    maps = [row for key in ("group-tables", "ours-per-layer") for row in select(pyramid, scheme=key)]
    if maps:
        figures.append(("layers", "Held pages by layer and time", layer_maps(maps, about, Shape(layers=plan.layers))))
    if any(row["runs"] for row in pyramid):
        figures.append(("contiguity", "Runs of neighbouring pages", contiguity(pyramid, about)))
    return figures


def waste_bars(rows: list[Result], about: str) -> Figure:
    """One bar a scheme: live, the kinds of waste, free."""
    figure, axes = plt.subplots(figsize=(10.5, 0.52 * len(rows) + 2.2))
    names = [SHORT[row["cell"]["scheme"]].replace("\n", " ") for row in rows]
    left = np.zeros(len(rows))
    for field, label, colour, hatch in KINDS:
        values = np.array([row["figures"][field] for row in rows])
        axes.barh(names, values, left=left, color=colour, label=label, hatch=hatch, edgecolor="white", linewidth=0.5)
        left += values
    for i, row in enumerate(rows):
        live = row["figures"]["live_pct"]
        inside = live > 12
        axes.text(live - 1 if inside else live + 1, i, f"{live:.0f} %", va="center", ha="right" if inside else "left",
                  color="white", fontweight="bold")  # fmt: skip
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the pool (%), mean while a request waits for memory")
    axes.set_title(f"Where the memory goes: {about}", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=2, fontsize=11)
    return figure


def utilisation(rows: list[Result], about: str) -> Figure:
    """Live tokens over pool, step by step."""
    figure, axes = plt.subplots(figsize=(10, 5))
    shown = [row for row in rows if row["cell"]["scheme"] not in ("ours-per-head", "ours-runs", "contiguous-exact")]
    for width, row in _widths([row for row in shown if row["cell"]["scheme"] in LINES]):
        colour, dash = LINES[row["cell"]["scheme"]]
        axes.plot(row["series"]["step"], 100 * np.array(row["series"]["live"]), dash, color=colour, linewidth=width,
                  label=SHORT[row["cell"]["scheme"]].replace("\n", " "))  # fmt: skip
    _limit_to_busy(axes, shown)
    axes.set_ylim(0, 102)
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_xlabel("decode step (each scheme stops when its queue is done)")
    axes.set_ylabel("live tokens (% of the pool)")
    axes.set_title(f"Utilisation: {about}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=11)
    return figure


def _widths(rows: list[Result]) -> list[tuple[float, Result]]:
    """Rows with line widths: lines that lie on each other get thinner, so that all are seen."""
    return [(max(2.0, 4.5 - 0.45 * i), row) for i, row in enumerate(rows)]


def _limit_to_busy(axes: Axes, rows: list[Result]) -> None:
    """End the time axis where all but the slowest schemes are done."""
    ends = sorted(row["series"]["step"][-1] for row in rows)
    axes.set_xlim(0, 1.15 * ends[len(ends) // 2])


def batches(backlog: list[Result], workload: str) -> Figure:
    """Mean batch by scheme, for an uncropped and a cropped schedule side by side."""
    schedules = [name for name in ("none", "pyramid", "random") if select(backlog, schedule=name)]
    rows = {name: at_default_page(select(backlog, schedule=name)) for name in schedules}
    keys = [row["cell"]["scheme"] for row in rows[schedules[0]]]
    figure, axes = plt.subplots(figsize=(11, 5))
    width = 0.8 / len(schedules)
    for i, (name, colour) in enumerate(zip(schedules, ("#999999", "#009E73", "#0072B2"), strict=False)):
        by_key = {row["cell"]["scheme"]: row["figures"] for row in rows[name]}
        x = np.arange(len(keys)) + (i - (len(schedules) - 1) / 2) * width
        means = np.array([by_key[key]["batch_mean"] for key in keys])
        low = means - np.array([by_key[key]["batch_p5"] for key in keys])
        axes.bar(x, means, width, color=colour, label=SCHEDULE_TITLES.get(name, name))
        axes.errorbar(x, means, yerr=[np.maximum(0, low), np.zeros(len(keys))], fmt="none", ecolor="black", capsize=2,
                      linewidth=1)  # fmt: skip
        for at, value in zip(x, means, strict=True):
            axes.text(at, value + 1, f"{value:.0f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(np.arange(len(keys)), [SHORT[key] for key in keys], rotation=40, ha="right", fontsize=10)
    axes.set_ylabel("sequences at once (mean; line down to p5)")
    axes.set_title(f"Batch at equal bytes: {workload}", loc="left")
    axes.legend(loc="upper left", fontsize=11)
    return figure


def page_sizes(rows: list[Result], about: str) -> Figure:
    """Waste inside pages against page size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    width = 5.0  # lines that lie on each other get thinner, so that all are seen
    for key in dict.fromkeys(row["cell"]["scheme"] for row in rows):
        points = sorted((r["cell"]["page_size"], r["figures"]) for r in select(rows, scheme=key))
        if len(points) < 2 or key == "ours-runs" or not SCHEMES[key].paged:
            continue
        colour, dash = LINES[key]
        width -= 0.5
        x = [size for size, _ in points]
        label = SHORT[key].replace("\n", " ").replace(" (256)", "")
        left.plot(
            x, [f["internal_pct"] for _, f in points], dash, marker="o", color=colour, label=label, linewidth=width
        )
        right.plot(x, [f["batch_mean"] for _, f in points], dash, marker="o", color=colour, linewidth=width)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        sizes = sorted({row["cell"]["page_size"] for row in rows})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("page size (tokens)")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#DDDDDD")
    left.set_ylabel("waste inside pages (% of the pool)")
    right.set_ylabel("sequences at once (mean)")
    figure.suptitle(f"Page size: {about}", x=0.07, ha="left", fontsize=13)
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=3, fontsize=11)
    figure.tight_layout()
    return figure


def layer_maps(rows: list[Result], about: str, shape: Shape) -> Figure:
    """Heat maps: what each layer holds, as a share of an equal part of the pool."""
    figure, grid = plt.subplots(1, len(rows), figsize=(5.6 * len(rows), 4.6), sharey=True, squeeze=False)
    tops = [float(np.array(row["layers"]).max()) * shape.layers for row in rows]
    image: Any = None
    for axes, row in zip(grid[0], rows, strict=True):
        held = np.array(row["layers"]).T * shape.layers
        steps = row["series"]["step"]
        extent = (steps[0], steps[-1], -0.5, shape.layers - 0.5)
        image = axes.imshow(
            held, aspect="auto", origin="lower", cmap="cividis", vmin=0, vmax=max(tops), extent=extent,
            interpolation="nearest",
        )  # fmt: skip
        axes.set_title(SHORT[row["cell"]["scheme"]].replace("\n", " "), loc="left")
        axes.set_xlabel("decode step")
    grid[0][0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=grid[0].tolist(), pad=0.02)
    bar.set_label(f"held / (pool / {shape.layers} layers)")
    figure.suptitle(f"Held pages by layer: {about}", x=0.06, y=1.0, ha="left", fontsize=13)
    return figure


def contiguity(rows: list[Result], about: str) -> Figure:
    """Cumulative share of pages by the length of the run of neighbours they are in."""
    figure, axes = plt.subplots(figsize=(9, 4.8))
    shown = [row for row in rows if row["runs"] and row["cell"]["scheme"] in LINES]
    for width, row in _widths([row for row in shown if row["cell"]["scheme"] != "ours-per-head"]):
        colour, dash = LINES[row["cell"]["scheme"]]
        axes.plot(2.0 ** np.arange(len(row["runs"])), 100 * np.array(row["runs"]), dash, marker="o", markersize=4,
                  color=colour, linewidth=width, label=SHORT[row["cell"]["scheme"]].replace("\n", " "))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    axes.set_ylim(0, 102)
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_xlabel("length of run (neighbouring pages in a table)")
    axes.set_ylabel("pages in runs of at most that length (%)")
    axes.set_title(f"Contiguity (lower is better): {about}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=11)
    return figure
