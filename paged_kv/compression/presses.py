"""What is known of kvpress from outside: its tested releases, and how its presses are recognised on a model.

Owns: recognising a press behind a hook, or behind a `forward` put in place of a model's; kinds that need more.
Does not know: caches, what a press computes. kvpress itself is not imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from paged_kv.compression.errors import UnsupportedMethod

#: Releases of kvpress that the tests run with.
TESTED = ("0.5.5",)

#: Why a press cannot work on pages, by the name of its class.
REFUSED = {"KVgradPress": "it puts layers of its own into the cache"}


@lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether there is a kvpress to import."""
    return importlib.util.find_spec("kvpress") is not None


def require_tested() -> None:
    """Refuse a kvpress that is missing, or whose release the tests do not cover.

    Raises:
        UnsupportedMethod: The message says what to do.
    """
    try:
        version = importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedMethod('kvpress is not installed: pip install "paged-kv[kvpress]"') from None
    if version not in TESTED:
        raise UnsupportedMethod(
            f"kvpress {version} is not among the tested releases ({', '.join(TESTED)}): go on with "
            "paged_kv.compression.kvpress.bridge(press, untested=True), or policy(press, untested=True)"
        )


def require_pageable(presses: Iterable[Any]) -> None:
    """Refuse presses that cannot work on pages.

    Raises:
        UnsupportedMethod: The message names the press and why.
    """
    for press in presses:
        for name, reason in REFUSED.items():
            if is_kind(press, name):
                raise UnsupportedMethod(f"{type(press).__name__} cannot work with pages: {reason}")


def is_kind(press: Any, name: str) -> bool:
    """Whether a press is of a class of kvpress, or of one made from it."""
    return any(base.__name__ == name for base in type(press).__mro__)


def rerotates(press: Any) -> bool:
    """Whether a press turns the keys it keeps to positions from zero on."""
    inner = getattr(press, "presses", None)
    if isinstance(inner, (list, tuple)):
        return any(rerotates(part) for part in inner)
    return is_kind(press, "KeyRerotationPress") or bool(getattr(press, "rerotate_keys", False))


def behind(functions: Iterable[Any]) -> list[Any]:
    """The presses that functions belong to, each once: hooks, or forwards put in place of a model's."""
    found: dict[int, Any] = {}
    for function in functions:
        for owner in _owners(function):
            if _is_press(owner):
                found[id(owner)] = owner
    return list(found.values())


def _is_press(owner: Any) -> bool:
    return any(base.__module__.split(".")[0] == "kvpress" for base in type(owner).__mro__)


def _owners(function: Any) -> Iterator[Any]:
    """What a function is bound to, was partially given, or closes over."""
    yield getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that is not bound yet
            yield cell.cell_contents
