"""A picture of a pool: which layer of which sequence holds its pages, what is shared, cached and free.

Owns: the frozen snapshot, and how it is drawn in a terminal (rich) and as one HTML file. Pure functions.
Does not know: caches, engines, files; it reads an allocator and prints nothing.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from allocator import BlockAllocator, SeqId
from paged_kv.memory import PagedMemory

__all__ = ["MemoryMap", "map_of", "render_html", "render_text", "snapshot"]

# Okabe and Ito: told apart by colour-blind readers. Sequences beyond them take the colours again.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_SHARED, _CACHED, _FREE = "#777777", "#BBBBBB", "#EEEEEE"
_MARKS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Who holds which pages at one moment.

    Attributes:
        name: what the pool is called.
        layers: model layer of each line.
        names: name of each sequence.
        page_size: tokens a page.
        page_bytes: bytes a page.
        own: [layers][sequences] pages that this sequence alone holds, over the lanes of the layer.
        shared: [layers] pages that several sequences hold, each counted once.
        live: [layers][sequences] live tokens, mean over the lanes.
        seen: [sequences] tokens seen.
        cached: pages that no sequence holds and the prefix index still knows.
        free: pages that nobody holds.
    """

    name: str
    layers: tuple[int, ...]
    names: tuple[str, ...]
    page_size: int
    page_bytes: int
    own: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    live: tuple[tuple[float, ...], ...]
    seen: tuple[int, ...]
    cached: int
    free: int

    @property
    def held(self) -> int:
        """Pages that sequences hold, shared ones once."""
        return sum(map(sum, self.own)) + sum(self.shared)

    @property
    def total(self) -> int:
        """Pages of the pool, without the null page."""
        return self.held + self.cached + self.free

    def held_in(self, line: int) -> int:
        """Pages held in the layer at `line`."""
        return sum(self.own[line]) + self.shared[line]


def map_of(memory: PagedMemory, names: Mapping[str, SeqId]) -> tuple[MemoryMap, ...]:
    """The maps of all pools of a model.

    Args:
        memory: The model's pages.
        names: Name and handle of every open sequence.
    """
    return tuple(
        snapshot(
            group.allocator,
            names,
            name=f"{group.spec.num_kv_heads} KV heads of {group.spec.key_width}",
            layers=group.spec.layers,
            page_bytes=group.spec.bytes_per_page,
        )
        for group in memory.groups
    )


def snapshot(
    allocator: BlockAllocator,
    seqs: Mapping[str, SeqId],
    *,
    name: str = "pool",
    layers: Sequence[int] | None = None,
    page_bytes: int = 0,
) -> MemoryMap:
    """The map of a pool now. O(table entries).

    Args:
        allocator: whose pages.
        seqs: name and handle of every open sequence; pages of sequences left out would count as free or cached.
        name: of the pool.
        layers: model layer of each of the allocator's layers; 0, 1, 2, ... by default.
        page_bytes: bytes a page, for the figures below the map.

    Raises:
        StaleHandle: a sequence is closed.
    """
    lines, lanes = allocator.num_layers, allocator.lanes
    handles = list(seqs.values())
    own = np.zeros((lines, len(handles)), np.int64)
    shared = np.zeros(lines, np.int64)
    live = np.zeros((lines, len(handles)))
    if handles:
        tables = allocator.block_tables(handles)  # [lines * lanes, sequences, pages]
        used = tables > 0
        owners = np.bincount(tables[used], minlength=allocator.num_pages)
        alone = used & (owners[tables] == 1)
        own = alone.sum(axis=2).reshape(lines, lanes, -1).sum(axis=1)
        for line in range(lines):
            part = slice(line * lanes, (line + 1) * lanes)
            shared[line] = len(np.unique(tables[part][used[part] & ~alone[part]]))
        live = allocator.live_lens(handles).reshape(lines, lanes, -1).mean(axis=1)
    stats = allocator.stats()
    return MemoryMap(
        name=name,
        layers=tuple(layers if layers is not None else range(lines)),
        names=tuple(seqs),
        page_size=allocator.page_size,
        page_bytes=page_bytes,
        own=tuple(tuple(row) for row in own.tolist()),
        shared=tuple(shared.tolist()),
        live=tuple(tuple(row) for row in live.tolist()),
        seen=tuple(allocator.seen_len(seq) for seq in handles),
        cached=stats.cached_pages,
        free=stats.free_pages,
    )


# ---------------------------------------------------------------- terminal


def render_text(memory: MemoryMap, *, width: int = 72) -> Group:
    """The map for a rich console: a bar of pages for each layer, a letter and colour for each sequence.

    Args:
        memory: the map.
        width: characters of the longest bar.
    """
    scale = max(1, -(-max((memory.held_in(line) for line in range(len(memory.layers))), default=1) // width))
    title = Text(f"{memory.name}: one character is {_pages(scale)}", style="bold")
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "pages", "live"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("held by", no_wrap=True)
    for line, layer in enumerate(memory.layers):
        mean = sum(memory.live[line]) / len(memory.names) if memory.names else 0.0
        table.add_row(str(layer), str(memory.held_in(line)), f"{mean:.0f}", _bar(memory, line, scale))
    legend = Text("  ")
    for i, name in enumerate(memory.names):
        legend.append(f" {_mark(i)} {name} ({memory.seen[i]} seen) ", style=f"on {_colour(i)} #000000")
        legend.append(" ")
    return Group(title, table, legend, Text(_summary(memory)))


def _bar(memory: MemoryMap, line: int, scale: int) -> Text:
    """Pages of a layer, sequence after sequence; rounded on the running sum, so that bars keep their lengths."""
    bar, pages, drawn = Text(), 0, 0
    parts = [(_mark(i), _colour(i), count) for i, count in enumerate(memory.own[line])]
    for mark, colour, count in [*parts, ("#", _SHARED, memory.shared[line])]:
        pages += count
        end = -(-pages // scale)
        bar.append(mark * (end - drawn), style=f"on {colour} #000000")
        drawn = end
    return bar


def _summary(memory: MemoryMap) -> str:
    shared = sum(memory.shared)
    parts = [
        f"{memory.held} of {_pages(memory.total)} held ({shared} shared: #)",
        f"{memory.cached} cached",
        f"{memory.free} free",
        f"page size {memory.page_size}",
    ]
    if memory.page_bytes:
        parts.append(
            f"{memory.held * memory.page_bytes / 2**20:.1f} of {memory.total * memory.page_bytes / 2**20:.1f} MiB"
        )
    return "; ".join(parts)


def _pages(count: int) -> str:
    return f"{count} page" if count == 1 else f"{count} pages"


def _colour(sequence: int) -> str:
    return _COLOURS[sequence % len(_COLOURS)]


def _mark(sequence: int) -> str:
    return _MARKS[sequence % len(_MARKS)]


# ---------------------------------------------------------------- HTML

_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2rem;color:#222}svg{width:100%;max-width:70rem;height:auto}"
    "text{font:11px system-ui,sans-serif;fill:#222}.key{display:inline-block;margin-right:1rem;white-space:nowrap}"
    ".key i{display:inline-block;width:1em;height:1em;margin-right:.3em;vertical-align:-.1em}"
)
_WIDTH, _LINE, _LEFT = 900, 16, 60


def render_html(maps: Sequence[MemoryMap], *, title: str = "Memory map") -> str:
    """One self-contained HTML page: for each pool a bar of pages for each layer, and what else the pool holds."""
    body = "".join(_section(memory) for memory in maps)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n"
    )


def _section(memory: MemoryMap) -> str:
    longest = max((memory.held_in(line) for line in range(len(memory.layers))), default=0) or 1
    scale = (_WIDTH - _LEFT - 110) / longest
    bars = "".join(_svg_line(memory, line, scale) for line in range(len(memory.layers)))
    height = _LINE * len(memory.layers) + 4
    pool = [(f"{memory.held} held", "#444444", memory.held), (f"{memory.cached} cached", _CACHED, memory.cached),
            (f"{memory.free} free", _FREE, memory.free)]  # fmt: skip
    keys = [(f"{name} ({memory.seen[i]} seen)", _colour(i)) for i, name in enumerate(memory.names)]
    return (
        f"<h2>{html.escape(memory.name)}</h2><p>{html.escape(_summary(memory))}</p>"
        f'<svg viewBox="0 0 {_WIDTH} 24" role="img" aria-label="pool">{_strip(pool, memory.total)}</svg>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="pages by layer">{bars}</svg>'
        f"<p>{''.join(_key(*key) for key in [*keys, ('shared', _SHARED)])}</p>"
    )


def _svg_line(memory: MemoryMap, line: int, scale: float) -> str:
    y, x = line * _LINE + 2, float(_LEFT)
    parts = [f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">layer {memory.layers[line]}</text>']
    counts = [(name, _colour(i), memory.own[line][i], memory.live[line][i]) for i, name in enumerate(memory.names)]
    for name, colour, pages, live in counts:
        tip = f"{name}: {_pages(pages)} of its own, {live:.0f} live tokens"
        parts.append(_rect(x, y, pages * scale, _LINE - 3, colour, tip))
        x += pages * scale
    parts.append(_rect(x, y, memory.shared[line] * scale, _LINE - 3, _SHARED, f"{_pages(memory.shared[line])} shared"))
    x += memory.shared[line] * scale
    parts.append(f'<text x="{x + 6:.1f}" y="{y + 11}">{_pages(memory.held_in(line))}</text>')
    return "".join(parts)


def _strip(parts: Sequence[tuple[str, str, int]], total: int) -> str:
    x, drawn = 0.0, []
    for tip, colour, count in parts:
        width = _WIDTH * count / max(1, total)
        drawn.append(_rect(x, 2, width, 18, colour, tip))
        x += width
    return "".join(drawn)


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    # One SVG element: its geometry, fill and tooltip.
    if width <= 0:
        return ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}" stroke="#fff" '
        f'stroke-width="0.5"><title>{html.escape(tip)}</title></rect>'
    )


def _key(name: str, colour: str) -> str:
    return f'<span class="key"><i style="background:{colour}"></i>{html.escape(name)}</span>'
