"""How many tokens each layer may keep: `{layer: budget}` for `crop_layers`, in tokens.

Owns: shapes of budgets across layers.
Does not know: which tokens fill them.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator import KVError
from paged_kv.compression.base import check_budget


def uniform(layers: Sequence[int], budget: int) -> dict[int, int]:
    """The same budget for every layer.

    Raises:
        KVError: The budget is not a number of tokens.
    """
    check_budget(budget, 0, "uniform")
    return dict.fromkeys(layers, budget)


def pyramid(
    layers: Sequence[int], budget: int, *, smallest: int = 8, length: int | None = None, steepness: float = 20
) -> dict[int, int]:
    """Budgets that fall in a straight line from the first layer to the last, and are `budget` on average.

    The last layer gets `budget / steepness`, but at least `smallest`; the first gets what keeps the mean, but at most
    `length - smallest`, and then the last gets more.

    Args:
        layers: Paged layers in order.
        budget: Mean tokens a layer.
        smallest: Least tokens a layer; SnapKV's window, where that scores.
        length: Tokens that there are to keep, None for no limit.
        steepness: How many times smaller than the mean the last budget is.

    Raises:
        KVError: The budget is not a number of tokens, or below `smallest`.
        ValueError: `steepness` is below 1.

    Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", 2024
    (arXiv 2406.02069). Here budgets below `smallest` are refused, where other code silently makes them equal.
    """
    check_budget(budget, 0, "pyramid")
    if budget < smallest:
        raise KVError(f"a pyramid whose layers keep at least {smallest} tokens cannot have a mean of {budget}")
    if steepness < 1:
        raise ValueError(f"steepness must be at least 1, got {steepness}")
    last = max(budget / steepness, smallest)
    first = 2 * budget - last
    if length is not None and first > length - smallest:
        first = max(length - smallest, budget)
        last = 2 * budget - first
    step = (first - last) / (len(layers) - 1) if len(layers) > 1 else 0.0
    if len(layers) == 1:
        return {layers[0]: budget}
    return {layer: round(first - index * step) for index, layer in enumerate(layers)}
