"""The table of docs/models.md, measured: what works for each family of models, on the release that is installed.

`python -m tests.cache.models_table measure FILE.json` once per release, then
`python -m tests.cache.models_table render docs/models.md FILE.json...`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

import paged_kv
from allocator import KVError
from paged_kv import LLM, PagedCache, SamplingParams, UnsupportedModel
from paged_kv.compression import KeyNorm
from tests.cache.pairs import Pair
from tests.cache.test_other_models import MODELS, SEQ2SEQ
from tests.tiny import FAMILIES, MORE_FAMILIES, padded, tiny_model, tokens

HEADER = """# Models

What was measured on tiny random models of each family, by `python -m tests.cache.models_table`; not written by hand.

- **drop-in**: `model.generate` through `PagedCache.for_model(model)` gives the tokens of `DynamicCache`.
- **crop**: layers cropped to different lengths, then single tokens and a chunk, equal a float64 reference to 1e-4.
- **windows**: pages behind sliding windows are freed by themselves ("-": the model has none).
- **engine**: `LLM.generate` gives the tokens of `model.generate` alone.
"""


def said(check: Callable[[], bool | str]) -> str:
    """ "yes", "no", or the reason given by an error or by the check itself."""
    try:
        result = check()
    except (KVError, ValueError, NotImplementedError) as error:
        return f"no: {str(error).splitlines()[0]}"
    return result if isinstance(result, str) else ("yes" if result else "NO, differs")


def generate(model: Any, inputs: Any, cache: Any) -> torch.Tensor:
    options = {"max_new_tokens": 20, "do_sample": False}
    if type(model).__name__ != "WhisperForConditionalGeneration":
        options["eos_token_id"] = None
    ids: torch.Tensor = model.generate(**inputs, past_key_values=cache, **options)
    return ids


def drops_in(model: Any, inputs: Any, pair: bool) -> bool:
    def wrap(make: Callable[[], Any]) -> Any:
        return EncoderDecoderCache(make(), make()) if pair else make()

    paged_kv.detach(model)
    expected = generate(model, inputs, wrap(lambda: DynamicCache(config=model.config)))
    got = generate(model, inputs, wrap(lambda: PagedCache.for_model(model, page_size=3)))
    paged_kv.detach(model)
    return torch.equal(expected, got)


def crops(family: str) -> bool | str:
    pair = Pair(family, page_size=3)
    if pair.model.config._attn_implementation != "paged_kv" or family in ("falcon", "imagegpt"):
        return "refused: the model does its own attention"
    try:
        pair.cache.crop_layers({layer: 7 + 4 * layer for layer in pair.cache.memory.layers}, KeyNorm())
    except UnsupportedModel:
        return "refused: attention is biased by distance"
    pair.follow()
    pair.step(tokens(1, 1, seed=5))
    pair.step(tokens(1, 9, seed=6))
    return True


def frees_windows(model: Any) -> bool | str:
    cache = PagedCache.for_model(model, page_size=4)
    if not any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        return "-"
    with torch.no_grad():
        for part in tokens(1, 100).split(20, dim=1):
            model(part, past_key_values=cache)
    held = [
        cache.layer_lengths()[cache.memory.layers.index(i)] for i in cache.memory.layers if cache.layers[i].is_sliding
    ]
    paged_kv.detach(model)
    return max(held) < 100


def engine_runs(model: Any) -> bool:
    paged_kv.detach(model)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (9, 30, 17)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    with LLM(model, num_pages=512, page_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        results = llm.generate(prompts, params, use_tqdm=False)
    if any(result.finish_reason == "error" for result in results):
        raise KVError(results[0].error or "error")
    return [list(result.token_ids) for result in results] == expected


def measure() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for family in FAMILIES | MORE_FAMILIES:
        try:
            model = tiny_model(family)
            generate(model, padded(1, 9, [0]), DynamicCache(config=model.config))
        except (AttributeError, ValueError):
            rows[family] = dict.fromkeys(("drop-in", "crop", "windows", "engine"), "needs a newer transformers")
            continue
        rows[family] = {
            "drop-in": said(lambda model=model: drops_in(model, padded(3, 37, [0, 5, 20]), False)),
            "crop": said(lambda family=family: crops(family)),
            "windows": said(lambda model=model: frees_windows(model)),
            "engine": said(lambda model=model: engine_runs(model)),
        }
    for make in MODELS:
        name = make.__name__.replace("_", " ")
        try:
            model, inputs = make()
            generate(model, inputs, None if make in SEQ2SEQ else DynamicCache(config=model.config))
        except AttributeError:
            rows[name] = dict.fromkeys(("drop-in", "crop", "windows", "engine"), "needs a newer transformers")
            continue
        rows[name] = {
            "drop-in": said(lambda m=model, i=inputs, pair=make in SEQ2SEQ: drops_in(m, i, pair)),
            "crop": "not measured",
            "windows": "-",
            "engine": "drop-in only" if name not in ("gemma4", "jamba") else said(lambda m=model: engine_runs(m)),
        }
    return rows


def render(files: list[Path]) -> str:
    parts = [HEADER]
    for file in files:
        data = json.loads(file.read_text())
        parts.append(f"\n## transformers {data['transformers']}\n")
        parts.append("| family | drop-in | crop | windows | engine |\n| --- | --- | --- | --- | --- |")
        for family, row in data["rows"].items():
            cells = " | ".join(row[column].replace("|", "/") for column in ("drop-in", "crop", "windows", "engine"))
            parts.append(f"| {family} | {cells} |")
    return "\n".join(parts) + "\n"


def main() -> None:
    command, target, *files = sys.argv[1:]
    if command == "measure":
        data = {"transformers": transformers.__version__, "rows": measure()}
        Path(target).write_text(json.dumps(data, indent=1))
    else:
        Path(target).write_text(render([Path(file) for file in files]))


if __name__ == "__main__":
    main()
