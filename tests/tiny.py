"""Tiny random models of many families: seconds to run, no download, the same weights every time."""

from __future__ import annotations

from typing import Any

import torch
import transformers

#: Vocabulary of every tiny model; ids 0 to 2 are left to pad, bos and eos.
VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

#: Family name to config class name, model class name, and what differs from the common arguments.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"num_hidden_layers": 7, "sliding_window": 16}),
}

_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a family's tiny model, with some arguments changed."""
    name, _, own = FAMILIES[family]
    base = {key: _COMMON[key] for key in _TOKENS} if family == "gpt2" else _COMMON
    return getattr(transformers, name)(**{**base, **own, **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A family's tiny model in fp32 and evaluation mode."""
    torch.manual_seed(seed)
    return getattr(transformers, FAMILIES[family][1])(tiny_config(family, **changes)).eval()


def tokens(num_rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids `[num_rows, length]` without special ones."""
    return torch.randint(3, VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def padded(num_rows: int, length: int, pads: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded inputs: `input_ids` and `attention_mask` `[num_rows, length]`, row `b` with `pads[b]` pads."""
    ids = tokens(num_rows, length, seed)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = 2
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}
