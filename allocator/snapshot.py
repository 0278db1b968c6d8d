"""`dump` and `load`: the whole metadata of an allocator as bytes.

::

    magic (8 bytes) | SHA-256 of the rest (32) | length of the header (8) | header (JSON) | arrays, one after another

The header holds version, configuration, plain values, and name, dtype and shape of each array. No pickle: bytes from
elsewhere can be wrong, not dangerous.
"""

from __future__ import annotations

import dataclasses
import json
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator.core import Core, Counters
from allocator.errors import BrokenInvariant, SnapshotCorrupt, SnapshotMismatch
from allocator.events import BlocksCleared
from allocator.hashing import BlockHash
from allocator.invariants import check_core
from allocator.types import PinId

__all__ = ["VERSION", "dump", "load"]

VERSION = 2
_MAGIC = b"pagedkv\n"
_POOL = ("refs", "block_of")
_TABLES = ("generation", "handles", "seen", "diverged", "lens", "kept_len", "kept_off", "base", "width")
_CORE = ("frozen_tail", "appended", "cross_written", "reserved")
_INDEX = ("pages", "idle", "depth", "level", "hashes")
_LRU = ("before", "after")
_PARTIAL = ("tokens", "newer", "older")


def dump(core: Core, config: dict[str, object]) -> bytes:
    """Serialises the state; see `PoolLifecycle.snapshot`."""
    arrays = _gather(core)
    header = {
        "version": VERSION,
        "config": config,
        "values": _values(core),
        "arrays": [(name, array.dtype.str, array.shape) for name, array in arrays.items()],
    }
    text = json.dumps(header).encode()
    body = b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())])
    return _MAGIC + sha256(body).digest() + body


def _gather(core: Core) -> dict[str, npt.NDArray[Any]]:
    pool, tables, index = core.pool, core.tables, core.prefix
    arrays: dict[str, npt.NDArray[Any]] = {f"pool.{name}": getattr(pool, name) for name in _POOL}
    arrays["free"] = pool.free_pages()
    arrays |= {f"tables.{name}": getattr(tables, name) for name in _TABLES}
    arrays["arena"] = tables.arena.data[: tables.arena.top]
    arrays |= {f"kept.{slot}": kept for slot, kept in enumerate(tables.kept) if kept is not None}
    arrays |= {f"core.{name}": getattr(core, name) for name in _CORE}
    arrays |= {f"pin.{pin}": pages for pin, pages in core.pins.items()}
    if index is not None:
        arrays |= {f"index.{name}": getattr(index, name) for name in _INDEX}
        arrays |= {f"lru.{name}": getattr(index.lru, name) for name in _LRU}
        arrays["free_blocks"] = index.free_blocks.pages()
        if index.partial is not None:
            arrays |= {f"partial.{name}": getattr(index.partial, name) for name in _PARTIAL}
    return arrays


def _values(core: Core) -> dict[str, Any]:
    partial = core.prefix.partial if core.prefix is not None else None
    return {
        "num_cached": core.pool.num_cached,
        "num_published": core.pool.num_published,
        "total_reserved": core.total_reserved,
        "next_pin": core.next_pin,
        "counters": dataclasses.asdict(core.counters),
        "chains": [chain.hex() for chain in core.chains],
        "free_slots": core.tables.free_slots,
        "free_extents": list(core.tables.arena.free.items()),
        "blocks": list(core.prefix.by_hash.values()) if core.prefix is not None else [],
        "parents": [(block, parent.hex()) for block, parent in partial.parents.items()] if partial is not None else [],
    }


def load(data: bytes, config: dict[str, object], core: Core) -> Core:
    """Fills the empty `core` from a snapshot and returns it; see `PoolLifecycle.restore`."""
    header, body = _open(data)
    for field, expected in (("version", VERSION), ("config", config)):
        if header.get(field) != json.loads(json.dumps(expected)):
            raise SnapshotMismatch(field, header.get(field), expected)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, shape in header["arrays"]:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(body[:size], dtype).reshape(shape).copy()
        body = body[size:]
    _fill_tables(core, arrays, header["values"])
    _fill_index(core, arrays, header["values"])
    try:
        check_core(core)
    except BrokenInvariant as broken:
        raise SnapshotCorrupt(f"the snapshot's state is broken: {broken}") from broken
    return core


def _open(data: bytes) -> tuple[dict[str, Any], memoryview]:
    start = len(_MAGIC) + 32
    if len(data) < start + 8 or data[: len(_MAGIC)] != _MAGIC:
        raise SnapshotCorrupt(f"{len(data)} bytes do not start like a snapshot")
    body = memoryview(data)[start:]
    if sha256(body).digest() != data[len(_MAGIC) : start]:
        raise SnapshotCorrupt(f"{len(data)} bytes do not match their checksum: truncated or altered")
    length = int.from_bytes(body[:8], "little")
    header: dict[str, Any] = json.loads(bytes(body[8 : 8 + length]))
    return header, body[8 + length :]


def _fill_tables(core: Core, arrays: dict[str, npt.NDArray[Any]], values: dict[str, Any]) -> None:
    tables = core.tables
    for name in _TABLES:
        setattr(tables, name, arrays[f"tables.{name}"])
    for name in _CORE:
        setattr(core, name, arrays[f"core.{name}"])
    tables.kept = [arrays.get(f"kept.{slot}") for slot in range(len(tables.handles))]
    tables.free_slots = values["free_slots"]
    tables.arena.load(arrays["arena"], dict(values["free_extents"]))
    core.chains = [bytearray.fromhex(chain) for chain in values["chains"]]
    core.hash_states = [None] * len(core.chains)
    core.pins = {PinId(int(name[4:])): pages for name, pages in arrays.items() if name.startswith("pin.")}
    core.next_pin, core.total_reserved = values["next_pin"], values["total_reserved"]
    core.counters = Counters(**values["counters"])


def _fill_index(core: Core, arrays: dict[str, npt.NDArray[Any]], values: dict[str, Any]) -> None:
    pool, index = core.pool, core.prefix
    pool.load(arrays["pool.refs"], arrays["pool.block_of"], arrays["free"])
    pool.num_cached, pool.num_published = values["num_cached"], values["num_published"]
    if index is None:
        return
    for name in _INDEX:
        setattr(index, name, arrays[f"index.{name}"])
    index.load(arrays["lru.before"], arrays["lru.after"], arrays["free_blocks"], values["blocks"])
    if index.partial is not None:
        for name in _PARTIAL:
            setattr(index.partial, name, arrays[f"partial.{name}"])
        index.partial.load({block: BlockHash(bytes.fromhex(parent)) for block, parent in values["parents"]})
    if index.events is not None:
        index.events.append(BlocksCleared())
