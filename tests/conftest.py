"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing from threads, and threads that spin at a barrier lose a lot on a machine that is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis repeats the same examples wherever it sees a CI; ours draws fresh ones there too, and prints how to repeat
# a failure. There are no deadlines: the machine is shared.
settings.register_profile(
    "fresh", derandomize=False, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fresh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `weights` where the weights package is not installed, and `gpu` where no device is."""
    from paged_kv.weights import WeightsNotFound, find_gguf

    try:
        find_gguf()
        missing_weights = False
    except WeightsNotFound:
        missing_weights = True
    for item in items:
        if item.get_closest_marker("weights") and missing_weights:
            item.add_marker(pytest.mark.skip(reason="the SmolLM2 weights package is not installed"))
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct (float32), converted once for this machine; use with `pytest.mark.weights`."""
    from paged_kv.weights import demo_model

    cache = os.environ.get("PAGED_KV_CACHE")
    return demo_model(Path(cache) if cache else None)
