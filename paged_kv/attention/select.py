"""Which backend runs a call, and why.

Owns: the list of backends, the order of preference, the choice by name.
Does not know: how any of them computes; GPU backends are imported only when a GPU call asks for them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paged_kv.attention.base import AttentionOptions, Backend
from paged_kv.attention.cpu import build as cpu_build
from paged_kv.attention.cpu.backend import CpuBackend
from paged_kv.attention.sdpa import SdpaBackend
from paged_kv.forward import BACKENDS
from paged_kv.store import LayerView


def _triton() -> Backend:
    from paged_kv.attention.gpu.triton_backend import TritonBackend

    return TritonBackend()


def _varlen() -> Backend:
    from paged_kv.attention.gpu.varlen import VarlenBackend

    return VarlenBackend()


def _triton_reason(device: torch.device) -> str | None:
    if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return "it runs on a GPU, not on the CPU"
    from paged_kv.attention.gpu import triton_reason

    return triton_reason(device)


def _varlen_reason(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "it runs on CUDA, not on the CPU"
    from paged_kv.attention.gpu import varlen_reason

    return varlen_reason(device)


def _cpu_reason(device: torch.device) -> str | None:
    return cpu_build.why_not() if device.type == "cpu" else f"it runs on the CPU, not on {device.type}"


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    make: Callable[[], Backend]
    reason: Callable[[torch.device], str | None]


#: In order of preference: the first that can run a call runs it.
_ENTRIES = (
    _Entry("cpu", CpuBackend, _cpu_reason),
    _Entry("varlen", _varlen, _varlen_reason),
    _Entry("triton", _triton, _triton_reason),
    _Entry("sdpa", SdpaBackend, lambda device: None),
)
NAMES = BACKENDS


class NoBackend(ValueError):
    """Raised when a backend asked for by name does not exist or cannot run; take "auto", or do what the reason says.

    Attributes:
        name: The name asked for.
        reason: Why it cannot run.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f'attention backend "{name}" cannot run: {reason}')
        self.name = name
        self.reason = reason


class FirstThatCan:
    """Several backends as one: each call goes to the first that can run it, the last can run all.

    Attributes:
        name: Name of the first, the one that runs ordinary calls.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = tuple(backends)
        self.name = self._backends[0].name

    def choose(self, query: Tensor, view: LayerView, options: AttentionOptions) -> tuple[Backend, list[str]]:
        """The backend for a call, and for each one passed over why (`"name: reason"`)."""
        passed: list[str] = []
        for backend in self._backends:
            reason = backend.unsupported(query, view, options)
            if reason is None:
                return backend, passed
            passed.append(f"{backend.name}: {reason}")
        raise NoBackend(self.name, "; ".join(passed))

    def unsupported(self, query: Tensor, view: LayerView, options: AttentionOptions) -> str | None:
        """None if any of them can run the call, else the reason of each."""
        reasons = [f"{b.name}: {reason}" for b in self._backends if (reason := b.unsupported(query, view, options))]
        return "; ".join(reasons) if len(reasons) == len(self._backends) else None

    def attend(self, query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
        """Attend with the first backend that can; see `Backend.attend`.

        Raises:
            NoBackend: None of them can.
        """
        backend, _ = self.choose(query, view, options)
        return backend.attend(query, view, options)


def pick_backend(device: torch.device | str = "cpu", *, name: str = "auto") -> Backend:
    """The backend for a device, by name or the best one.

    "auto" gives the available backends in order of preference as one: a call that the best cannot run (gradients, a
    dtype) goes to the next, at last to gather-and-SDPA. On a CPU without a C++ compiler there is one warning.

    Args:
        device: Where the pages are.
        name: One of `NAMES`.

    Raises:
        NoBackend: No such name, or the backend asked for is not available here; the reason says why.
    """
    device = torch.device(device)
    if name not in NAMES:
        raise NoBackend(name, f"the names are {', '.join(NAMES)}")
    if name != "auto":
        entry = next(entry for entry in _ENTRIES if entry.name == name)
        if reason := entry.reason(device):
            raise NoBackend(name, reason)
        return entry.make()
    found = []
    for entry in _ENTRIES:
        reason = entry.reason(device)
        if reason is None:
            found.append(entry.make())
        elif entry.name == "cpu" and device.type == "cpu":
            _warn_once(reason)
    return FirstThatCan(found)


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"attention gathers pages and calls SDPA, which is slower: the fused CPU kernel is not available: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )


def available_backends(device: torch.device | str = "cpu") -> list[tuple[str, bool, str]]:
    """Every backend as (name, whether it runs on the device, why or why not), the preferred first."""
    device = torch.device(device)
    rows = []
    for entry in _ENTRIES:
        reason = entry.reason(device)
        rows.append((entry.name, reason is None, reason or f"runs on {device.type}"))
    return rows


def build() -> Path:
    """Compile the CPU kernel ahead of its first use; returns the library.

    Raises:
        KernelUnavailable: No compiler, or it fails.
    """
    return cpu_build.build()
