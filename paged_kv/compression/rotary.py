"""Rotary positions as compression needs them: turning states that were rotated already.

Owns: reading a model's frequencies, turning by distances, the mean rotation over a range of positions.
Does not know: policies, caches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kv.compression.errors import UnsupportedMethod

#: Kinds of rotary embedding whose frequencies change with the length, so that a turn is not a rotation by distance.
_CHANGING = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """A model's rotary frequencies, in the layout that pairs dimension `i` with `i + half`.

    Attributes:
        frequencies: float32 `[half]`, radians per position; the first `2 * half` dimensions are rotated.
    """

    frequencies: Tensor

    @classmethod
    def of(cls, model: Any) -> Rotary:
        """The frequencies of a transformers model.

        Raises:
            UnsupportedMethod: It has none, they differ between layers or change with the length, or it pairs
                dimensions differently.
        """
        name = type(model).__name__
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        module = getattr(decoder, "rotary_emb", None)
        if module is None or not hasattr(module, "inv_freq"):
            raise UnsupportedMethod(f"{name} has no rotary embedding that all its layers share")
        if getattr(module, "rope_type", "default") in _CHANGING:
            raise UnsupportedMethod(f"the rotary frequencies of {name} ({module.rope_type}) change with the length")
        rotate = getattr(sys.modules[type(module).__module__], "rotate_half", None)
        probe = torch.arange(4.0)
        if rotate is None or not torch.equal(rotate(probe), rotate_half(probe)):
            raise UnsupportedMethod(f"{name} pairs rotated dimensions in a layout that is not supported")
        return cls(module.inv_freq.detach().float())

    def turn(self, states: Tensor, distances: Tensor) -> Tensor:
        """Rotate states on by some positions each, back if negative.

        Args:
            states: `[..., tokens, width]`.
            distances: `[tokens]`, in positions.
        """
        angles = distances.to(self.frequencies.device, torch.float32)[:, None] * self.frequencies
        both = torch.cat([angles, angles], dim=-1).to(states.device)
        width = both.shape[-1]
        part = states[..., :width].float()
        turned = part * both.cos() + rotate_half(part) * both.sin()
        return torch.cat([turned.to(states.dtype), states[..., width:]], dim=-1)

    def mean_rotation(self, first: int, count: int, width: int) -> Tensor:
        """The mean of the rotations to positions `first` to `first + count - 1`: a matrix `[width, width]`."""
        eye = torch.eye(width, device=self.frequencies.device)
        positions = torch.arange(first, first + count)
        angles = positions.to(eye.device, torch.float32)[:, None] * self.frequencies
        both = torch.cat([angles, angles], dim=-1)
        half = both.shape[-1]
        rotated = eye[:, :half] * both.cos().mean(dim=0) + rotate_half(eye[:, :half]) * both.sin().mean(dim=0)
        return torch.cat([rotated, eye[:, half:]], dim=-1).T


def rotate_half(states: Tensor) -> Tensor:
    """A quarter turn of every pair (i, i + half): `[..., width]`."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
