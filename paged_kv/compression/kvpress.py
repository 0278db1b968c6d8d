"""NVIDIA's kvpress: its presses as policies, and its presses where `PagedCache.for_model` is not asked.

Owns: `policy(press)` for crops by budget, `bridge(press)` for `with` blocks.
Does not know: how hooks are hung (`pressing`), how a press looks as a policy from inside (`press_policy`).

A press itself needs none of this: `with press(model): ...` works with caches made by `PagedCache.for_model(model)`.
kvpress is an optional dependency (`pip install "paged-kv[kvpress]"`), looked for when a function here is called.
"""

from __future__ import annotations

from typing import Any

from paged_kv.compression.press_policy import PressPolicy, policy_of
from paged_kv.compression.presses import TESTED, require_pageable, require_tested
from paged_kv.compression.pressing import Bridge
from paged_kv.live import Policy
from paged_kv.traits import TokenBudget

__all__ = ["TESTED", "Bridge", "PressPolicy", "bridge", "policy"]


def bridge(press: Any, *, untested: bool = False) -> Bridge:
    """A press with hooks of ours for its `with` block alone, used in its place.

    A press works on a `PagedCache.for_model` by itself. Behind the bridge it also works on caches made without a model,
    on plain caches under transformers releases that rename what kvpress's hooks look for, and with other releases of
    kvpress; and what it does when its block ends (KVzip and its kin) is done to the cache there and then.

    Args:
        press: Any press of kvpress.
        untested: Go on with a kvpress release that the tests do not cover.

    Raises:
        UnsupportedMethod: kvpress is not installed, its release is not tested, or the press cannot work.
    """
    if not untested:
        require_tested()
    require_pageable([press])
    return Bridge(press, untested=untested)


def policy(press: Any, model: Any = None, *, budget: TokenBudget = None, untested: bool = False) -> Policy:
    """A press as a policy: the press scores or selects, the budget is the caller's, whatever ratio the press has.

    Args:
        press: A press that works on keys, values and queries of one layer.
        model: The model, for presses that read its weights or rotary embedding.
        budget: Tokens to keep where nothing else says how many, such as in `SamplingParams(compression=policy)`.
        untested: Go on with a kvpress release that the tests do not cover.

    Raises:
        UnsupportedMethod: kvpress is not installed or not tested, or the press needs more than a layer's tokens.
    """
    if not untested:
        require_tested()
    return policy_of(press, model, budget)
