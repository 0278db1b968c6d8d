"""The output of a batch job on disk: written in order, safe against being killed, resumed where it stopped.

Owns: the output file, its manifest, finished rows that wait for an earlier one, resuming and retrying.
Does not know: models, what a line means.

Beside `out.jsonl` lie `out.jsonl.manifest.json` (what the job is) and, after an orderly stop, `out.jsonl.ahead.jsonl`
(rows that were finished before an earlier one was). Lines are appended in input order, so the number of whole lines is
how far the job is; a torn last line is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Seconds between two calls of fsync.
SYNC_INTERVAL = 5.0


class JobError(ValueError):
    """Raised when a batch job cannot start or go on. Do: what the message says."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a batch file that are not blank, with their numbers from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def fingerprint(path: Path) -> tuple[str, int]:
    """SHA-256 of a file, and how many lines of it are not blank.

    Raises:
        JobError: It cannot be read, or holds no line.
    """
    digest, rows = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                rows += bool(line.strip())
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from error
    if not rows:
        raise JobError(f"{path} holds no rows")
    return digest.hexdigest(), rows


class Journal:
    """The output of one job. Rows are numbered from 0 in input order."""

    def __init__(self, path: Path, manifest: dict[str, Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Not opened yet: see `start`, `resume`."""
        self.path = path
        self.manifest = manifest
        self.num_written = 0
        self._ahead: dict[int, bytes] = {}
        self._file: Any = None
        self._clock = clock
        self._synced = clock()

    @property
    def manifest_path(self) -> Path:
        """Where the manifest lies."""
        return self.path.with_name(self.path.name + ".manifest.json")

    @property
    def ahead_path(self) -> Path:
        """Where finished rows lie that wait for an earlier one."""
        return self.path.with_name(self.path.name + ".ahead.jsonl")

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, source: Path, *, overwrite: bool = False) -> None:
        """Start the job, or go on with it if the output belongs to the same one.

        Raises:
            JobError: The output is the input, belongs to another job, has no manifest, or cannot be written.
        """
        if self.path.exists() and self.path.samefile(source):
            raise JobError(f"output and input are the same file: {self.path}")
        try:
            if overwrite or not self.path.exists():
                self._start()
            else:
                self._resume()
        except OSError as error:
            raise JobError(f"cannot write {self.path}: {error.strerror}") from error

    def _start(self) -> None:
        self.ahead_path.unlink(missing_ok=True)
        self._file = self.path.open("wb")
        self._write_manifest()

    def _resume(self) -> None:
        if not self.manifest_path.exists():
            raise JobError(f"{self.path} exists and is no output of this program: choose another, or --overwrite")
        try:
            found = json.loads(self.manifest_path.read_bytes())
        except ValueError as error:
            raise JobError(f"{self.manifest_path} is damaged ({error}): --overwrite starts over") from None
        if differing := _differences(found, self.manifest):
            raise JobError(
                f"{self.path} belongs to another job ({'; '.join(differing)}): choose another output, or --overwrite"
            )
        self.num_written, size = _whole_lines(self.path)
        self._file = self.path.open("r+b")
        self._file.truncate(size)
        self._file.seek(size)
        if self.ahead_path.exists():
            self._read_ahead()
            self.flush()

    def _read_ahead(self) -> None:
        with self.ahead_path.open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    saved = json.loads(line)
                    if saved["row"] >= self.num_written:
                        self._ahead[saved["row"]] = saved["line"].encode()

    def _write_manifest(self) -> None:
        temporary = self.manifest_path.with_name(self.manifest_path.name + ".tmp")
        temporary.write_text(json.dumps(self.manifest, indent=1) + "\n")
        os.replace(temporary, self.manifest_path)

    # -- rows --------------------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether every row is written."""
        return self.num_written >= int(self.manifest["rows"])

    @property
    def num_waiting(self) -> int:
        """Finished rows that wait for an earlier one."""
        return len(self._ahead)

    def has(self, row: int) -> bool:
        """Whether a row is done."""
        return row < self.num_written or row in self._ahead

    def add(self, row: int, line: dict[str, Any]) -> None:
        """Note a row's answer and write what is next in order.

        Raises:
            JobError: The disk is full or the file cannot be written; what is written stays, and can be resumed.
        """
        self._ahead[row] = encode(line)
        self.flush()

    def flush(self) -> None:
        """Write what is next in order; see `add`."""
        try:
            wrote = False
            while (line := self._ahead.get(self.num_written)) is not None:
                self._file.write(line)
                del self._ahead[self.num_written]
                self.num_written += 1
                wrote = True
            if wrote:
                self._file.flush()
            if self._clock() - self._synced > SYNC_INTERVAL:
                os.fsync(self._file.fileno())
                self._synced = self._clock()
        except OSError as error:
            raise JobError(
                f"cannot write {self.path}: {error.strerror}; {self.num_written} rows are done, "
                "make room and run the same command again"
            ) from error

    def close(self) -> None:
        """Write everything out; finished rows that wait for an earlier one are kept beside the output."""
        if self._file is None:
            return
        try:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            with suppress(OSError):
                self._file.close()
            if self._ahead:
                saved = [json.dumps({"row": row, "line": line.decode()}) for row, line in sorted(self._ahead.items())]
                self.ahead_path.write_text("\n".join(saved) + "\n")
            else:
                self.ahead_path.unlink(missing_ok=True)
        finally:
            self._file = None

    # -- retrying ----------------------------------------------------------------------------------------------------

    def rows_where(self, chosen: Callable[[dict[str, Any]], bool]) -> list[int]:
        """The written rows whose line is chosen."""
        with self.path.open("rb") as file:
            return [row for row, line in enumerate(file) if row < self.num_written and chosen(json.loads(line))]

    def replace(self, answers: dict[int, dict[str, Any]]) -> None:
        """Replace written rows; the file is exchanged in one step."""
        temporary = self.path.with_name(self.path.name + ".retry")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            for row, line in enumerate(old):
                new.write(encode(answers[row]) if row in answers else line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, self.path)


def encode(line: dict[str, Any]) -> bytes:
    """A line as it is written."""
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _differences(found: Any, wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """What of a manifest is not as wanted, value by value."""
    found = found if isinstance(found, dict) else {}
    differing = []
    for name, value in wanted.items():
        was = found.get(name)
        if was == value:
            continue
        if name == "input_sha256":
            differing.append("the input has changed")
        elif isinstance(value, dict):
            differing += _differences(was, value, f"{prefix}{name}.")
        else:
            differing.append(f"{prefix}{name} was {_short(was)} and is {_short(value)}")
    return differing


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _whole_lines(path: Path) -> tuple[int, int]:
    """How many whole lines a file begins with, and their bytes."""
    rows = size = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                json.loads(line)
            except ValueError:
                break
            rows += 1
            size += len(line)
    return rows, size
