"""The model that presses and policies are tried on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compression.press_models import press_model


@pytest.fixture
def model() -> Any:
    """A new tiny model for each test."""
    return press_model()
