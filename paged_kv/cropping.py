"""Cropping, the public way: which live tokens a layer or a head keeps.

Owns: the crop methods of `PagedCache`, their arguments and errors.
Does not know: how tokens are appended, how a policy chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from allocator import KVError
from paged_kv import _compat
from paged_kv.appending import AppendingCache
from paged_kv.batch import PagedBatch
from paged_kv.keep import Keep, check_budget, check_indices, check_lanes, keep_by_lane, keep_ends
from paged_kv.live import LiveTokens, Policy
from paged_kv.spec import UnsupportedModel
from paged_kv.traits import why_no_policy


def _chosen(batch: PagedBatch, row: int, layer_idx: int, policy: Policy, budget: int) -> Sequence[np.ndarray]:
    """A policy's keep-list of each lane of a layer of one row, checked before anything changes."""
    tokens = batch.memory.live_tokens(batch.seqs[row], layer_idx)
    kept = check_lanes(policy.keep(tokens, budget), tokens.num_lanes, policy, layer_idx)
    for indices, positions in zip(kept, tokens.positions, strict=True):
        check_indices(np.asarray(indices), len(positions), f"layer {layer_idx} in row {row}")
    return kept


class EmptyCache(KVError):
    """Raised when a cache without tokens is asked about its pages. Do: run a forward first."""


class CroppingCache(AppendingCache):
    """The part of `PagedCache` that crops layers and heads."""

    def crop_layer(
        self,
        layer_idx: int,
        keep: Keep | None = None,
        *,
        keep_last: int | None = None,
        sinks: int = 0,
        row: int | None = None,
    ) -> int:
        """Keep some live tokens of one layer and free the pages of the others; positions go on counting.

        Args:
            layer_idx: Model layer index.
            keep: Live indices, strictly increasing: one list for all rows, or one per row.
            keep_last: Instead of `keep`: the newest tokens to keep of each row.
            sinks: With `keep_last`: the oldest live tokens to keep besides.
            row: Crop this row alone; all by default.

        Returns:
            Pages freed.

        Raises:
            KVError: Unknown layer or row, indices out of order or range, an empty cache; nothing changed.
        """
        batch = self._cropable(layer_idx)
        live = batch.live_lens(layer_idx)
        rows = self._rows(row)
        if (keep is None) == (keep_last is None):
            raise KVError("give exactly one of keep and keep_last")
        if keep is not None:
            chosen = keep_by_lane(keep, live, rows)
        else:
            assert keep_last is not None
            chosen = keep_ends(keep_last, sinks, live, rows)
        return self._crop_rows(batch, rows, [{layer_idx: lanes} for lanes in chosen])

    def crop_heads(self, layer_idx: int, keep: Sequence[Keep], *, row: int | None = None) -> int:
        """Keep other live tokens in each KV head of one layer; needs `lanes="head"`.

        Args:
            layer_idx: Model layer index.
            keep: Per KV head, its live indices, strictly increasing.
            row: Crop this row alone; all by default.

        Returns:
            Pages freed.

        Raises:
            KVError: As `crop_layer`; or a number of heads other than the layer's lanes. Nothing changed.
        """
        batch = self._cropable(layer_idx)
        live = batch.live_lens(layer_idx)
        if len(keep) != live.shape[0]:
            hint = "" if live.shape[0] > 1 else '; make the cache with lanes="head" to crop heads apart'
            raise KVError(f"keep names {len(keep)} heads, layer {layer_idx} has {live.shape[0]} lanes{hint}")
        rows = self._rows(row)
        by_head = [keep_by_lane(indices, live[[head]], rows) for head, indices in enumerate(keep)]
        chosen = [[head[place][0] for head in by_head] for place in range(len(rows))]
        return self._crop_rows(batch, rows, [{layer_idx: lanes} for lanes in chosen])

    def crop_layers(self, budgets: Mapping[int, int], policy: Policy) -> int:
        """Crop layers to their budgets by a policy, in one step.

        Args:
            budgets: Layer index to the number of tokens each lane may keep.
            policy: Chooses them; see `paged_kv.compression`.

        Returns:
            Pages freed.

        Raises:
            KVError: Unknown layer, negative or fractional budget, an empty cache, or keep-lists of the policy that do
                not fit the layer; nothing changed.
        """
        if not isinstance(budgets, Mapping):
            raise KVError(f"budgets must map layers to numbers of tokens, got {budgets!r:.80}")
        if reason := why_no_policy(policy):
            raise KVError(f"{reason}, got {policy!r:.80}")
        if getattr(policy, "rerotate", False):
            raise KVError("crop_layers does not turn keys: use paged_kv.compression.compress for rerotate=True")
        for layer_idx, budget in budgets.items():
            self._cropable(layer_idx)
            check_budget(layer_idx, budget)
        batch = self._batch
        if batch is None or not budgets:
            return 0
        rows = self._rows(None)
        chosen = [
            {layer_idx: _chosen(batch, row, layer_idx, policy, budget) for layer_idx, budget in budgets.items()}
            for row in rows
        ]
        return self._crop_rows(batch, rows, chosen)

    def live_tokens(self, layer_idx: int, row: int = 0) -> LiveTokens:
        """Private copies of what a policy sees of one layer of one row.

        Raises:
            KVError: Unknown layer or row, or an empty cache.
        """
        batch = self._cropable(layer_idx)
        return batch.memory.live_tokens(batch.seqs[self._rows(row)[0]], layer_idx)

    def require_unshared(self, layer_idx: int) -> None:
        """Refuse to go on if rows share pages of a layer, since shared pages are never rewritten.

        Raises:
            KVError: They do; or an unknown layer, or an empty cache.
        """
        batch = self._cropable(layer_idx)
        batch.memory.require_unshared(layer_idx, batch.seqs)

    def _cropable(self, layer_idx: int) -> PagedBatch:
        if _compat.biases_by_distance(self._config):
            raise UnsupportedModel(
                f"{type(self._config).__name__}: the model biases attention by the distance between columns, which a "
                "crop would change, so its layers cannot be cropped"
            )
        self._settle()
        if self._batch is None:
            raise EmptyCache("the cache holds no tokens: run a forward before cropping")
        if layer_idx not in self._batch.memory.layers:
            own = "; it reads the keys and values of another layer" if _compat.shares(self._config, layer_idx) else ""
            raise KVError(f"no paged layer {layer_idx}{own}; paged layers are {self._batch.memory.layers}")
        return self._batch

    def _rows(self, row: int | None) -> list[int]:
        assert self._batch is not None
        num_rows = len(self._batch.seqs)
        if row is not None and not 0 <= row < num_rows:
            raise KVError(f"row {row} is not among the {num_rows} rows of the cache")
        return list(range(num_rows)) if row is None else [row]

    def _crop_rows(self, batch: PagedBatch, rows: list[int], chosen: list[dict[int, Sequence[np.ndarray]]]) -> int:
        freed = 0
        for row, layers in zip(rows, chosen, strict=True):
            keep = {(layer, lane): indices for layer, lanes in layers.items() for lane, indices in enumerate(lanes)}
            freed += batch.crop(row, keep)
        self._trim(batch)
        return freed
