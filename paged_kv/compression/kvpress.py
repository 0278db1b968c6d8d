"""NVIDIA's kvpress: its presses on paged caches, and its presses as policies.

Owns: which kvpress is supported, `bridge(press)` for `with` blocks, `policy(press)` for crops by budget.
Does not know: how hooks are hung (`pressing`), how a press looks as a policy from inside (`press_policy`).

kvpress is an optional dependency (`pip install "paged-kv[kvpress]"`), looked for when a function here is called.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from paged_kv.compression.errors import UnsupportedMethod
from paged_kv.compression.press_policy import PressPolicy, policy_of
from paged_kv.compression.pressing import Bridge
from paged_kv.live import Policy
from paged_kv.traits import TokenBudget

__all__ = ["Bridge", "PressPolicy", "bridge", "policy"]

#: Releases of kvpress that the tests run with.
TESTED = ("0.5.5",)


def bridge(press: Any, *, untested: bool = False) -> Bridge:
    """A press that works with `PagedCache` on every supported transformers, used in its place.

    `with bridge(press)(model): model.generate(ids, past_key_values=PagedCache.for_model(model, lanes="head"))` frees
    pages for every kind of press, those of single heads included, and runs on transformers releases that rename what
    kvpress's hooks look for. All hooks are on this model and gone after the block.

    Args:
        press: Any press of kvpress.
        untested: Go on with a kvpress release that the tests do not cover.

    Raises:
        UnsupportedMethod: kvpress is not installed, its release is not tested, or the press cannot work.
    """
    _require_kvpress(untested)
    name = type(press).__name__
    if name == "KVgradPress":
        raise UnsupportedMethod("KVgradPress puts layers of its own into the cache and cannot work with pages")
    return Bridge(press, rerotates=_rerotates(press))


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
    _require_kvpress(untested)
    return policy_of(press, model, budget)


def _require_kvpress(untested: bool) -> None:
    try:
        version = importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedMethod('kvpress is not installed: pip install "paged-kv[kvpress]"') from None
    if version not in TESTED and not untested:
        raise UnsupportedMethod(
            f"kvpress {version} is not among the tested releases ({', '.join(TESTED)}): pass untested=True to go on"
        )


def _rerotates(press: Any) -> bool:
    """Whether a press turns kept keys to positions from zero on."""
    inner = getattr(press, "presses", None)
    if isinstance(inner, (list, tuple)):
        return any(_rerotates(part) for part in inner)
    return type(press).__name__ == "KeyRerotationPress" or bool(getattr(press, "rerotate_keys", False))
