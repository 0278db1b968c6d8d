"""One forward pass through a model, and what travels with it from the cache to mask and attention.

Owns: the names under which things travel, the state of a forward, the handle on a key tensor, who else is attached to a
model.
Does not know: how a cache begins or ends a forward, how attention is computed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from allocator import KVError
from paged_kv.batch import PagedBatch
from paged_kv.rows import RowMap, pack, unpack
from paged_kv.step import Step

if TYPE_CHECKING:
    from paged_kv.cache import PagedCache

Function = TypeVar("Function", bound=Callable[..., Any])

#: The name under which attention and mask are registered with transformers.
ATTENTION = "paged_kv"
#: The attribute of a key tensor under which its handle travels from `update` to the attention function.
HANDLE = "paged_kv_handle"


#: Names of attention backends, the preferred ones first; "auto" takes the first that can run a call.
BACKENDS = ("auto", "cpu", "varlen", "triton", "sdpa")


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a room above the cache adds to every model that a drop-in cache is made for, and how it takes it back.

    `attach` says whether it added something.
    """

    attach: Callable[[Any], bool]
    detach: Callable[[Any], None]


#: Filled when the package is imported; see `PagedCache.for_model` and `detach`.
ATTACHMENTS: list[Attachment] = []


class MaskLength(int):
    """A mask's `kv_length` that remembers its cache, so that a mask function can find it without global state."""

    cache: PagedCache

    def __new__(cls, length: int, cache: PagedCache) -> MaskLength:
        """The number `length`, tied to `cache`."""
        number = super().__new__(cls, length)
        number.cache = cache
        return number


#: The cache that was asked for the sizes of a mask by compiled code, until the mask function takes it.
_asked = threading.local()


def remember_for_mask(cache: PagedCache) -> None:
    """Note which cache the next mask of this thread is for, where compiled code has no `MaskLength` to say it."""
    _asked.cache = weakref.ref(cache)


def cache_of_mask(kv_length: int) -> PagedCache | None:
    """The cache that a mask of this length is made for, None if it is for none; what was remembered is forgotten."""
    remembered, _asked.cache = getattr(_asked, "cache", None), None
    if isinstance(kv_length, MaskLength):
        return kv_length.cache
    return None if remembered is None else remembered()


def uncompiled(function: Function) -> Function:
    """Let `torch.compile` break its graph at a function instead of tracing it: tables change with every token."""
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class GradientsNeeded(KVError):
    """Raised by a backward pass that would go through pages. Do: train without a paged cache (`use_cache=False`)."""


class _NoWayBack(torch.autograd.Function):
    """The identity, whose backward pass raises: what was read from pages remembers no graph."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, *origins: Tensor) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GradientsNeeded("gradients do not flow through pages: train without a paged cache (use_cache=False)")


def without_graph(states: Tensor, *origins: Tensor) -> Tensor:
    """`states` read from pages, made to raise in a backward pass where one of its `origins` needs a gradient."""
    if torch.is_grad_enabled() and any(origin.requires_grad for origin in origins):
        guarded: Tensor = _NoWayBack.apply(states, *origins)  # type: ignore[no-untyped-call]
        return guarded
    return states


class HandlesOnly:
    """Mixed into a cache whose `update` needs keys and values alone and ties a handle with `attend` to the keys.

    With such a cache attention has no mask and reads nothing but the handle, whatever the model passes on.
    """


@dataclass(slots=True)
class Forward:
    """One forward pass through the model: the columns it adds, and the layers that have been given theirs.

    `step` is None while shapes are being learnt; `stash` then holds the dense K and V of each layer.
    `backend` names the attention backend that the cache asks for; `assigned` is what somebody set a stashed layer to.
    """

    rows: RowMap
    num_columns: int
    step: Step | None
    packing: Tensor | None
    backend: str
    done: set[int] = field(default_factory=set)
    stash: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    assigned: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerHandle:
    """Where a key tensor's tokens lie: what the attention function needs to read pages instead of the tensor."""

    layer: int
    forward: Forward
    batch: PagedBatch

    def pack(self, query: Tensor) -> Tensor:
        """`[rows, heads, columns, width]` as packed tokens `[tokens, heads, width]` without padding."""
        return pack(query, self.forward.packing)

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed tokens as `[rows, columns, heads, width]`, zeros at padding."""
        return unpack(packed, self.forward.packing, (self.forward.rows.num_rows, self.forward.num_columns))
