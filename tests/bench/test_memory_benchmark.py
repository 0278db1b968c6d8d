"""The memory benchmark says of each cache what arithmetic says."""

from __future__ import annotations

import pytest

from bench.memory import measure, resident
from tests.tiny import tiny_model


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
def test_a_quarter_kept_is_a_quarter_held(kind: str):
    model = tiny_model("llama")
    config = model.config
    held = measure(kind, model, rows=2, length=512, keep=0.25, page_size=16)
    token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * model.dtype.itemsize
    spare = 0 if kind == "dynamic" else 0.03 * held["full"].said  # a pool holds a null page and grows in steps
    assert 0 <= held["full"].said - 2 * 512 * token <= spare
    assert 0 <= held["cropped"].said - 2 * 128 * token <= spare


def test_the_resident_memory_of_the_process_is_read():
    before = resident()
    block = bytearray(b"x" * 2**26)
    assert resident() - before > 0.9 * len(block)
