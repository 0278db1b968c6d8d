"""What every press frees, as kvpress is installed: on a `DynamicCache`, and on a `PagedCache`.

Run once in each environment; the figures of each transformers release are kept in a JSON file beside the table, and the
table is written anew from all of them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from bench.compression.presses import Entry, catalog, model, prompt, tokenizer_of
from paged_kv import PagedCache

FOLDER = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[2] / "docs" / "compression.md"
BEGIN, END = "<!-- presses: written by `python -m bench.compression --table` -->", "<!-- presses end -->"

LENGTH, QUESTION, DECODED = 512, 9, 9


def measure(entry: Entry, length: int = LENGTH) -> dict[str, Any]:
    """One press, alone and here: what works, what is freed, the largest difference of the logits."""
    logging.disable(logging.WARNING)
    alone, here = _attempt(entry, length, paged=False), _attempt(entry, length, paged=True)
    row = {"name": entry.name, "kind": entry.kind, "alone": _outcome(alone), "here": _outcome(here)}
    if "logits" in here and "logits" in alone:
        row["difference"] = float((here["logits"] - alone["logits"]).abs().max())
    if "uneven" in here:
        row["chunk_difference"] = here["uneven"]
    return row


def _outcome(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key in ("error", "freed", "chunk_error")}


def _attempt(entry: Entry, length: int, *, paged: bool) -> dict[str, Any]:
    net = model()
    net.set_attn_implementation(entry.attention)
    with tokenizer_of(net), torch.no_grad():
        try:
            return _run(entry, net, length, paged=paged)
        except Exception as error:  # noqa: BLE001 - that a press fails is a result
            return {"error": f"{type(error).__name__}: {error}"[:160]}


def _run(entry: Entry, net: Any, length: int, *, paged: bool) -> dict[str, Any]:
    ids = prompt(length)
    if entry.name == "FinchPress":
        ids[0, length - 33] = 3
    result: dict[str, Any] = {}
    press = entry.make(net)
    cache: Any = PagedCache.for_model(net, lanes="head") if paged else DynamicCache()
    question = prompt(length + QUESTION)[:, length:]
    seen = length + entry.appended
    with press(net):
        net(ids, past_key_values=cache)
        if entry.kind == "decoding":
            for step in range(DECODED):
                at = torch.tensor([[seen + step]])
                net(torch.tensor([[45000 + step]]), past_key_values=cache, position_ids=at)
    seen += DECODED if entry.kind == "decoding" else 0
    result["freed"] = 1 - _held(cache, net, seen) / (seen * _token_bytes(net))
    restarts = not paged and ("Rerotation" in entry.name or entry.name == "FinchPress")
    first = cache.get_seq_length() if restarts else seen
    positions = torch.arange(first, first + QUESTION)[None]
    if paged:
        cache.check()
    singles = [
        net(question[:, i : i + 1], past_key_values=cache, position_ids=positions[:, i : i + 1]).logits
        for i in range(QUESTION)
    ]
    result["logits"] = torch.cat(singles, dim=1)
    if not result["logits"].isfinite().all():
        raise FloatingPointError("logits are not finite")
    try:
        if paged:
            cache.crop(-QUESTION)
            at_once = net(question, past_key_values=cache, position_ids=positions).logits
            result["uneven"] = float((at_once - result["logits"]).abs().max())
        else:
            net(question, past_key_values=cache, position_ids=positions + QUESTION)
    except (RuntimeError, ValueError) as error:
        result["chunk_error"] = f"{type(error).__name__}: {error}"[:160]
    return result


def _held(cache: Any, net: Any, seen: int) -> int:
    """Bytes that a cache's tokens take: pages, or the storages of the tensors."""
    if isinstance(cache, PagedCache):
        return cache.num_pages() * cache.memory.groups[0].spec.bytes_per_page
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    return sum(states.untyped_storage().nbytes() for states in tensors)


def _token_bytes(net: Any) -> int:
    config = net.config
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4)


def run(names: list[str] | None = None) -> None:
    """Measure all presses in this environment, keep the figures, and write the table."""
    rows = []
    for entry in catalog():
        if names and not any(name in entry.name for name in names):
            continue
        row = measure(entry)
        print(json.dumps(row), flush=True)
        rows.append(row)
    if names:
        return
    FOLDER.mkdir(exist_ok=True)
    release = ".".join(transformers.__version__.split(".")[:2])
    (FOLDER / f"{release}.json").write_text(json.dumps(rows, indent=1) + "\n")
    write()


def write() -> None:
    """Write the table in the document from the figures of all environments."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}{END}{after}")


def table() -> str:
    """The table in Markdown."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"), key=_release)}
    releases = list(found)
    by_name: dict[str, dict[str, Any]] = {}
    for release, rows in found.items():
        for row in rows:
            by_name.setdefault(row["name"], {})[release] = row
    head = ["press", *(f"alone, {r}" for r in releases), "a chunk after it, alone"]
    head += [*(f"here, {r}" for r in releases), "freed alone", "freed here", "logits differ by"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, rows in by_name.items():
        first = rows[releases[0]]
        cells = [name, *(_works(rows[r]["alone"]) for r in releases)]
        cells += ["raises" if "chunk_error" in first["alone"] else _works(first["alone"])]
        cells += [_works(rows[r]["here"]) for r in releases]
        cells += [_percent(first["alone"]), _percent(rows[releases[-1]]["here"]), _difference(first)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _release(path: Path) -> tuple[int, ...]:
    return tuple(map(int, path.stem.split(".")))


def _works(side: dict[str, Any]) -> str:
    if "error" not in side:
        return "yes"
    return "refused" if side["error"].startswith("UnsupportedMethod") else "raises"


def _percent(side: dict[str, Any]) -> str:
    return f"{100 * side['freed']:.1f} %" if "freed" in side else "-"


def _difference(row: dict[str, Any]) -> str:
    return f"{row['difference']:.0e}" if "difference" in row else "-"
