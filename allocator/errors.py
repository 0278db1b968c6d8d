"""The error tree of the allocator.

::

    KVError
    ├── OutOfPages          not enough pages; nothing was changed
    ├── StaleHandle         a sequence or pin that was closed, or never existed
    ├── InvalidArgument     a value that no state of the allocator could accept (also a ValueError)
    ├── AlreadyWritten      a write-once (cross-attention) table was written twice
    ├── PagesPinned         pages that a transfer still reads stand in the way
    ├── DoubleFree          a page was given back more often than it was taken
    ├── SnapshotError       a snapshot that cannot be restored here
    │   ├── SnapshotCorrupt     truncated, altered, or not a snapshot
    │   └── SnapshotMismatch    of another version or of another configuration
    └── BrokenInvariant     `check()` found a state that must not exist: a bug, please report it

Every call that raises one of these has changed nothing.
"""

from __future__ import annotations

__all__ = [
    "AlreadyWritten",
    "BrokenInvariant",
    "DoubleFree",
    "InvalidArgument",
    "KVError",
    "OutOfPages",
    "PagesPinned",
    "SnapshotCorrupt",
    "SnapshotError",
    "SnapshotMismatch",
    "StaleHandle",
]


class KVError(Exception):
    """Root of every error that paged-kv raises on purpose."""


class OutOfPages(KVError):
    """Raised when a call needs more pages than are available.

    Do: close, preempt, crop or truncate a sequence, or wait until one ends, then call again.

    Attributes:
        needed: pages that the call needs.
        available: pages that it could have had (free, cached and not reserved for others).
        total: usable pages of the pool (the null page is not one of them).
    """

    def __init__(self, needed: int, available: int, total: int) -> None:
        super().__init__(needed, available, total)
        self.needed, self.available, self.total = needed, available, total

    def __str__(self) -> str:
        return f"needs {self.needed} pages, {self.available} of {self.total} are available"


class StaleHandle(KVError):
    """Raised when a handle names nothing that is open. Do: forget the handle after closing it."""

    def __init__(self, handle: object, kind: str = "sequence") -> None:
        super().__init__(handle, kind)
        self.handle, self.kind = handle, kind

    def __str__(self) -> str:
        return f"{self.kind} {self.handle!r} is closed or was never opened"


class InvalidArgument(KVError, ValueError):
    """Raised when an argument is wrong whatever the state. Do: fix the caller.

    Attributes:
        name: the argument.
        value: what was given.
        reason: what is wrong with it.
    """

    def __init__(self, name: str, value: object, reason: str) -> None:
        super().__init__(name, value, reason)
        self.name, self.value, self.reason = name, value, reason

    def __str__(self) -> str:
        return f"{self.name} = {self.value!r}: {self.reason}"


class AlreadyWritten(KVError):
    """Raised when a write-once table gets a second write. Do: open a new sequence for a new source."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self.handle = handle

    def __str__(self) -> str:
        return f"the write-once tables of sequence {self.handle} were written before"


class PagesPinned(KVError):
    """Raised when pinned pages would have to move. Do: unpin (finish the transfer), then call again."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.pages = pages

    def __str__(self) -> str:
        return f"{self.pages} pages that would have to move are pinned"


class DoubleFree(KVError):
    """Raised when a page is released more often than it is referenced. Do: report it, or fix direct use of the pool."""

    def __init__(self, page: int, references: int) -> None:
        super().__init__(page, references)
        self.page, self.references = page, references

    def __str__(self) -> str:
        return f"page {self.page} is released more often than its {self.references} references"


class SnapshotError(KVError):
    """Root of the errors of `restore`."""


class SnapshotCorrupt(SnapshotError):
    """Raised when bytes are not a whole, unaltered snapshot. Do: take another copy of it."""


class SnapshotMismatch(SnapshotError):
    """Raised when a snapshot is of another version or configuration. Do: restore into an equal allocator."""

    def __init__(self, field: str, found: object, expected: object) -> None:
        super().__init__(field, found, expected)
        self.field, self.found, self.expected = field, found, expected

    def __str__(self) -> str:
        return f"snapshot has {self.field} = {self.found!r}, this allocator {self.expected!r}"


class BrokenInvariant(KVError):
    """Raised by `check()` alone. Do: report it with the calls that led to it."""
