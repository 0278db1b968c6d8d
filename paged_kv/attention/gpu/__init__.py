"""Attention over pages on a GPU: torch's variable-length attention where it fits, else Triton kernels.

Importing this package imports neither triton nor any kernel; the reasons here tell whether that is worth it.
"""

from __future__ import annotations

import importlib.util

import torch


def triton_reason(device: torch.device, *, interpreted: bool = False) -> str | None:
    """Why the Triton backend cannot run on a device, or None.

    Args:
        device: Where the pages are.
        interpreted: Whether Triton runs its kernels in Python (`TRITON_INTERPRET=1`), which works on any device.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not interpreted:
        return f"it runs on CUDA and ROCm devices, not on {device.type}"
    return None


def varlen_reason(device: torch.device) -> str | None:
    """Why torch's variable-length attention over a block table cannot run on a device, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    return None
