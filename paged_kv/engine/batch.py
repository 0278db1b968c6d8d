"""The tensors of one step: all rows' tokens packed into one, without padding.

Owns: packing, positions, which logits are needed.
Does not know: pages, the model, what the logits are for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paged_kv.engine.plan import StepPlan
from paged_kv.engine.request import Row


@dataclass(frozen=True, slots=True)
class Span:
    """The logits of one row.

    Attributes:
        row: Whose they are.
        first: First line among the step's logits.
        count: Lines.
        position: Position of the token that the first line belongs to; it predicts the next one.
    """

    row: Row
    first: int
    count: int
    position: int

    @property
    def samples(self) -> bool:
        """Whether the last of the lines predict tokens that are not known yet."""
        return self.position + self.count >= len(self.row.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the forward pass of a step is given.

    Attributes:
        input_ids: int64 `[1, tokens]`, the rows' tokens one after the other.
        position_ids: int64 `[1, tokens]`.
        logits_index: int64 `[lines]`, the tokens whose logits are needed.
        spans: Rows with logits, in order of their lines.
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_index: Tensor
    spans: tuple[Span, ...]


def build(plan: StepPlan, device: torch.device) -> Batch:
    """Pack the tokens of a plan; cost is in the number of rows and tokens, nothing per layer."""
    ids: list[int] = []
    positions: list[np.ndarray] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for row, count in zip(plan.rows, plan.counts, strict=True):
        begin = row.num_computed
        end = begin + count
        offset = len(ids)
        if count == 1:
            ids.append(row.tokens[begin])
        else:
            ids += row.tokens[begin:end]
            ids += row.draft[: count - (len(ids) - offset)]
        positions.append(np.arange(begin, end))
        first = _first_logit(row, begin, end)
        if first < end:
            spans.append(Span(row, len(wanted), end - first, first))
            wanted += range(offset + first - begin, offset + count)
    return Batch(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.from_numpy(np.concatenate(positions)).unsqueeze(0).to(device),
        logits_index=torch.tensor(wanted, dtype=torch.int64, device=device),
        spans=tuple(spans),
    )


def _first_logit(row: Row, begin: int, end: int) -> int:
    """The first position in `begin..end` whose logits are needed, `end` for none."""
    if (needed := row.request.logits_from) is not None and begin < row.num_prompt - 1:
        return min(max(begin, needed), end)
    return min(max(begin, len(row.tokens) - 1), end)
