"""What it means for pages that somebody assigns a layer's dense keys and values.

Compression libraries read `layer.keys`, choose survivors and assign the shorter tensor back. Here the survivors are
found again among what was read, by their bytes: the others' pages are freed and each survivor keeps its position.

Owns: recognising survivors, and the order in which they are stored.
Does not know: pages, transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Survivors:
    """What one lane of one row keeps.

    Attributes:
        columns: int64 `[heads, kept]`, per head the columns of what was read, ascending.
        order: int64 `[heads, kept]`, per head where these stand in the tensors that were assigned.
        is_same: Whether the assigned bytes equal those that were read, so that nothing needs to be written.
    """

    columns: np.ndarray
    order: np.ndarray
    is_same: bool


def survivors(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Survivors:
    """Recognise which of the old tokens the new ones are.

    By keys and values; if a method changes the keys (rotation, pruned channels) by values alone, or the reverse. What
    cannot be recognised counts as the newest of the old tokens, in the order given.

    Args:
        old: Keys and values as they were read: `[heads, tokens, width]` each.
        new: As assigned: `[heads, kept, width]` each, at most as many tokens.
    """
    for parts, is_same in (((0, 1), True), ((1,), False), ((0,), False)):
        columns = [_find([old[p][h] for p in parts], [new[p][h] for p in parts]) for h in range(old[0].shape[0])]
        if all(found is not None for found in columns):
            found = np.stack([column for column in columns if column is not None])
            order = np.argsort(found, axis=1, kind="stable")
            return Survivors(np.take_along_axis(found, order, axis=1), order, is_same)
    heads, kept = new[0].shape[:2]
    newest = np.arange(old[0].shape[1] - kept, old[0].shape[1])
    return Survivors(np.tile(newest, (heads, 1)), np.tile(np.arange(kept), (heads, 1)), is_same=False)


def _find(old: list[Tensor], new: list[Tensor]) -> np.ndarray | None:
    """Where each of the new tokens stands among the old ones, equal ones in turn; None if one is not there."""
    places: dict[bytes, list[int]] = {}
    for index, token in enumerate(_as_bytes(old)):
        places.setdefault(token, []).append(index)
    found = []
    for token in _as_bytes(new):
        left = places.get(token)
        if not left:
            return None
        found.append(left.pop(0))
    return np.asarray(found, np.int64)


def _as_bytes(parts: list[Tensor]) -> list[bytes]:
    """The bytes of each token over all its parts `[tokens, width]`."""
    raw = [part.detach().contiguous().view(torch.uint8).cpu().numpy() for part in parts]
    return [token.tobytes() for token in np.concatenate(raw, axis=1)]
