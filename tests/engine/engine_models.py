"""Tiny random models of several families, with enough spread in their logits that greedy tokens are well defined."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

VOCAB = 97

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "gemma3": lambda: Gemma3TextConfig(**(_COMMON | {"num_hidden_layers": 4}), head_dim=16, sliding_window=9,
                                       layer_types=["sliding_attention", "full_attention"] * 2),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=7),
}  # fmt: skip


def tiny(family: str, *, seed: int = 0) -> Any:
    """A random model of a family, fp32, in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3 if "embed" in name or "wte" in name else 0.15)
    return model


def alone(model: Any, prompt: list[int], max_tokens: int, **kwargs: Any) -> list[int]:
    """What `model.generate` gives for one prompt by itself, greedy unless told otherwise."""
    arguments = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0} | kwargs
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return [int(token) for token in out[0, len(prompt) :]]


def prompts(number: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
