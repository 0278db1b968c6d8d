"""What a scheme is: it holds memory for sequences whose needs the simulation tells it, or says that it is full."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from allocator.waste import Waste
from bench.fragmentation.schedules import Schedule
from bench.fragmentation.shape import Shape

__all__ = ["Full", "Request", "Scheme", "State", "run_lengths"]

Ints = npt.NDArray[np.int64]


class Full(Exception):
    """A scheme has no room for what it was asked to hold; it changed nothing."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it is admitted: after a preemption, the generated tokens are part of the prompt."""

    index: int
    prompt: int
    output: int

    @property
    def final(self) -> int:
        """Tokens when it is done."""
        return self.prompt + self.output


@dataclass(slots=True)
class State:
    """The running sequences by slot number, int64 arrays that grow together.

    Attributes:
        seen: [capacity] tokens so far.
        final: [capacity] tokens at the end.
        live: [capacity, layers, heads or 1] tokens that each row needs.
    """

    seen: Ints
    final: Ints
    live: Ints

    @classmethod
    def empty(cls, capacity: int, layers: int, heads: int) -> State:
        """Room for `capacity` sequences."""
        return cls(
            np.zeros(capacity, np.int64), np.zeros(capacity, np.int64), np.zeros((capacity, layers, heads), np.int64)
        )


class Scheme(ABC):
    """One way of managing KV memory.

    All amounts are in slots of one head of one layer. `slots` are numbers of running sequences in a `State`.

    Attributes:
        key: short name. title: name for people. models: whose behaviour this is. checked: from what that is known.
        static: whether a batch runs until its last sequence is done (no joining in between).
        paged: whether page size matters.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    models: ClassVar[str]
    checked: ClassVar[str]
    static: ClassVar[bool] = False
    paged: ClassVar[bool] = True

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        self.shape = shape
        self.schedule = schedule
        self.watermark = watermark
        self.weight = shape.heads // schedule.heads(shape)  # heads that one entry of `live` stands for

    @abstractmethod
    def admit(self, slot: int, request: Request, live: Ints) -> None:
        """Hold the whole prompt, then drop to `live` [layers, heads or 1]. Raises Full."""

    @abstractmethod
    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        """One decode step: each sequence gets ``1 + drafts`` tokens, then keeps `live` [batch, layers, heads or 1].

        `state` is as before the step. Raises Full.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """Give back all that the sequence holds."""

    @abstractmethod
    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        """Where the pool's slots are. `waiting` is the request that did not fit, if there is one."""

    @abstractmethod
    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        """Slots held in each layer, int64 [layers]."""

    def start(self, slots: Ints, state: State) -> None:  # noqa: B027 - only static schemes need it
        """Called once a static batch is put together, after its prompts are known."""

    def table_bytes(self, slots: Ints) -> int:
        """Bytes of page tables (int32 entries); 0 where there are none."""
        return 0

    def page_tables(self, slots: Ints) -> list[npt.NDArray[np.integer]]:
        """Every page table of every sequence, as pages of `page_unit` slots in one address space; empty if none."""
        return []

    @property
    def page_unit(self) -> int:
        """Slots of one page of `page_tables`."""
        return self.shape.page_size * self.shape.heads

    @property
    def longest_admissible(self) -> int:
        """Tokens of the longest request that the empty pool would take."""
        return self.shape.pool_tokens

    def needed(self, slots: Ints, state: State) -> int:
        """Slots of tokens that their own rows need."""
        return int(state.live[slots].sum()) * self.weight


def run_lengths(tables: list[npt.NDArray[np.integer]]) -> Ints:
    """Lengths of runs of neighbouring pages, over all tables; they sum to the number of table entries."""
    tables = [table for table in tables if len(table)]
    if not tables:
        return np.zeros(0, np.int64)
    flat = np.concatenate(tables).astype(np.int64)
    breaks = np.ones(len(flat), bool)
    breaks[1:] = flat[1:] != flat[:-1] + 1
    breaks[np.cumsum([0, *(len(table) for table in tables[:-1])])] = True
    starts = np.flatnonzero(breaks)
    return np.diff(np.append(starts, len(flat)))
