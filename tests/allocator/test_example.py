"""The embedding example: it finishes every request, and uses everything it claims to use."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from allocator import OutOfPages

PATH = Path(__file__).parents[2] / "examples" / "embed_nano_engine.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_nano_engine", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_it_is_short_and_knows_no_torch() -> None:
    text = PATH.read_text()
    assert len(text.splitlines()) < 150
    assert "import torch" not in text


@pytest.mark.parametrize("seed", range(3))
def test_every_request_finishes_with_sharing_forks_crops_and_preemptions(example: ModuleType, seed: int) -> None:
    engine = example.main(num_requests=30, num_pages=130, seed=seed)
    requests = example.trace(30, seed)
    assert len(engine.finished) == 30 + sum(request.forks for request in requests)
    for request in engine.finished:
        assert len(request.tokens) == len(request.prompt) + request.max_tokens
    stats = engine.allocator.stats()
    assert stats.num_seqs == stats.active_pages == 0
    assert stats.prefix_hits > 0
    assert stats.copied_pages > 0
    assert stats.preemptions > 0
    assert engine.crops > 0


def test_a_request_that_can_never_fit_is_an_error(example: ModuleType) -> None:
    with pytest.raises(OutOfPages):
        example.main(num_requests=3, num_pages=10)
