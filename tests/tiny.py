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
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"num_hidden_layers": 7, "sliding_window": 16}),
}

_SLIDING = ["sliding_attention", "full_attention"] * 2

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
    "head_dim": 8,
}

#: More families: the wider grid.
MORE_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "gpt neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"rotary_pct": 0.5, "num_key_value_heads": 8, "head_dim": 8}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 8, "head_dim": 8},
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 16, "attn_logit_softcapping": 5.0}),
    "gpt oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "layer_types": _SLIDING},
    ),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 16}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "deepseek v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    "deepseek v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 3, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "new_decoder_architecture": False},
    ),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 3, "use_cache": True}),
    "imagegpt": ("ImageGPTConfig", "ImageGPTForCausalImageModeling", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    "qwen3 next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 6,
            "laurel_rank": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": None,
            "intermediate_size": 96,
        },
    ),
}

_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


_ALL = FAMILIES | MORE_FAMILIES

#: Families whose configs use other names than most.
_OWN_NAMES = ("gpt2", "gptj", "bloom", "mpt", "imagegpt", "falcon")


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a family's tiny model, with some arguments changed."""
    name, _, own = _ALL[family]
    base = {key: _COMMON[key] for key in _TOKENS} if family in _OWN_NAMES else _COMMON
    return getattr(transformers, name)(**{**base, **own, **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A family's tiny model in fp32 and evaluation mode."""
    torch.manual_seed(seed)
    return getattr(transformers, _ALL[family][1])(tiny_config(family, **changes)).eval()


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
