"""Saving a cache to a file and loading it, without pickle: safetensors for bytes, the allocator's snapshot for tables.

Owns: the file's layout and its version.
Does not know: transformers' cache contract.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from allocator import KVError, SeqId
from paged_kv.batch import PagedBatch
from paged_kv.group import Budget, Group, shares
from paged_kv.memory import PagedMemory
from paged_kv.rows import RowMap
from paged_kv.spec import KVSpec

#: Version of the layout; a file of another one is refused.
VERSION = 1


class UnreadableCache(KVError):
    """Raised when a file is no saved cache, or one of another version. Do: save it again with this version."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What a file says besides tensors."""

    version: int
    specs: list[dict[str, Any]]
    seqs: list[int]
    num_columns: int
    cropped: list[int]
    max_bytes: int


def save(batch: PagedBatch, path: Path) -> None:
    """Write the pages and tables of a batch to `path`, whatever stood there before."""
    memory = batch.memory
    tensors: dict[str, torch.Tensor] = {"real": torch.from_numpy(batch.rows.real().copy())}
    for index, group in enumerate(memory.groups):
        tensors[f"{index}.keys"] = group.store.keys
        tensors[f"{index}.values"] = group.store.values
        tensors[f"{index}.tables"] = torch.frombuffer(bytearray(group.allocator.snapshot()), dtype=torch.uint8)
    header = {
        "version": VERSION,
        "specs": [_as_json(group.spec) for group in memory.groups],
        "seqs": [int(seq) for seq in batch.seqs],
        "num_columns": batch.rows.num_columns,
        "cropped": sorted(batch.cropped),
        "max_bytes": memory.budget.max_bytes,
    }
    save_file(tensors, path, metadata={"paged_kv": json.dumps(header)})


def load(path: Path) -> PagedBatch:
    """Read a batch back: the same pages, tables and sequence ids.

    Raises:
        UnreadableCache: The file is no saved cache, is cut short or altered, or of another version.
        OSError: The file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = _header((file.metadata() or {}).get("paged_kv"), path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise UnreadableCache(f"{path} is no saved cache: {error}") from error
    specs = [_from_json(entry) for entry in header.specs]
    groups = []
    for index, (spec, most) in enumerate(zip(specs, shares(header.max_bytes, specs), strict=True)):
        group = Group.empty(spec, tensors[f"{index}.keys"].shape[0], enable_prefix_caching=False, capacity=most)
        group.allocator.restore(tensors[f"{index}.tables"].numpy().tobytes())
        group.store.keys.copy_(tensors[f"{index}.keys"])
        group.store.values.copy_(tensors[f"{index}.values"])
        groups.append(group)
    held = sum(group.store.nbytes for group in groups)
    memory = PagedMemory.of_groups(groups, Budget(max(held, header.max_bytes), held))
    rows = RowMap(len(header.seqs))
    rows.append(header.num_columns, tensors["real"].numpy().astype(np.bool_))
    return PagedBatch.of(memory, rows, [SeqId(seq) for seq in header.seqs], set(header.cropped))


def _header(text: str | None, path: Path) -> _Header:
    if text is None:
        raise UnreadableCache(f"{path} is no saved cache: it has no paged_kv header")
    fields = json.loads(text)
    if fields.get("version") != VERSION:
        raise UnreadableCache(f"{path} is of version {fields.get('version')}, this is version {VERSION}")
    return _Header(**fields)


def _as_json(spec: KVSpec) -> dict[str, Any]:
    fields = {name: getattr(spec, name) for name in KVSpec.__slots__}
    return fields | {"dtype": str(spec.dtype).removeprefix("torch."), "device": str(spec.device)}


def _from_json(fields: dict[str, Any]) -> KVSpec:
    own = {"dtype": getattr(torch, fields["dtype"]), "device": torch.device(fields["device"])}
    tuples = {"layers": tuple(fields["layers"]), "windows": tuple(fields["windows"])}
    return KVSpec(**{**fields, **own, **tuples})
