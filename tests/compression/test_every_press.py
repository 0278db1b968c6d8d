"""Every press of kvpress works as it is installed, with the logits that it has on a plain cache, and frees pages."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("kvpress")

from bench.compression.presses import Entry, catalog
from bench.compression.table import DOCUMENT, FOLDER, measure, table
from paged_kv._compat import CROP_REMOVES

#: kvpress leaves the whole context twice; half of one of them is dropped.
LEAVES_TWICE = "KVComposePress(unstructured)"


@pytest.mark.parametrize("entry", catalog(), ids=lambda entry: entry.name)
def test_a_press_works_exactly_and_frees_what_it_drops(entry: Entry) -> None:
    row = measure(entry, length=192)
    if entry.refused:
        assert row["here"]["error"].startswith("UnsupportedMethod")
        return
    assert "error" not in row["here"]
    assert row["chunk_difference"] <= 1e-5
    if CROP_REMOVES:
        assert "KeyError" in row["alone"]["error"] or "AttributeError" in row["alone"]["error"]
        return
    assert row["difference"] <= 1e-5
    if entry.kind == "heads" and entry.name != LEAVES_TWICE:
        assert row["here"]["freed"] > 0.2 > row["alone"]["freed"]


def test_the_table_in_the_documentation_is_of_the_stored_figures_and_releases_agree() -> None:
    assert table() in DOCUMENT.read_text()
    stored: list[list[dict[str, Any]]] = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    for rows in zip(*stored, strict=True):
        assert len({row["name"] for row in rows}) == 1
        assert len({row["here"].get("freed") for row in rows}) == 1
