"""A model folder with a tokenizer, as a user of the command line has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batch_files import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
