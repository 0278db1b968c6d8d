"""Encoder-decoders, models that see, and hybrids: the same tokens as `DynamicCache`, whatever the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

import paged_kv
from paged_kv import PagedCache
from paged_kv._compat import CROP_REMOVES
from tests.tiny import tokens

pytestmark = pytest.mark.slow

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SEQ2SEQ = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
}


def build(model: str, config: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval()


def t5() -> tuple[Any, dict[str, Any]]:
    model = build(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return model, {"input_ids": tokens(2, 11)}


def bart() -> tuple[Any, dict[str, Any]]:
    own = {"max_position_embeddings": 128, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return build("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ, **own), {"input_ids": tokens(2, 11)}


def whisper() -> tuple[Any, dict[str, Any]]:
    own = {
        "max_source_positions": 30,
        "max_target_positions": 100,
        "num_mel_bins": 8,
        "decoder_start_token_id": 3,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    model = build("WhisperForConditionalGeneration", "WhisperConfig", **_SEQ2SEQ, **own)
    return model, {"input_features": torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(1))}


def mllama() -> tuple[Any, dict[str, Any]]:
    text = {
        **_SMALL,
        **_TOKENS,
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "num_channels": 3,
    }
    model = build(
        "MllamaForConditionalGeneration", "MllamaConfig", vision_config=vision, text_config=text, image_token_index=127
    )
    ids = tokens(1, 9) % 120 + 3
    ids[:, 1] = 127
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(1)),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 9, 1, 1, dtype=torch.long),
    }


def llava() -> tuple[Any, dict[str, Any]]:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=16,
    )
    text = transformers.LlamaConfig(**_SMALL, num_hidden_layers=3)
    model = build(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        vision_config=vision,
        text_config=text,
        image_token_index=127,
        vision_feature_layer=-1,
    )
    ids = tokens(1, 12) % 120 + 3
    ids[:, 2:6] = 127
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def qwen2_vl() -> tuple[Any, dict[str, Any]]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    model = build(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text_config={**_SMALL, **_TOKENS, "num_hidden_layers": 3, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "mlp_ratio": 2,
        },
        image_token_id=126,
        video_token_id=125,
        vision_start_token_id=124,
        vision_end_token_id=123,
    )
    ids = tokens(1, 12) % 120 + 3
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 124, 126, 123
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    return model, inputs | ({"mm_token_type_ids": (ids == 126).int()} if CROP_REMOVES else {})


def gemma4() -> tuple[Any, dict[str, Any]]:
    model = build(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        **_SMALL,
        **_TOKENS,
        vocab_size_per_layer_input=128,
        num_hidden_layers=6,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    return model, {"input_ids": tokens(1, 30)}


def jamba() -> tuple[Any, dict[str, Any]]:
    model = build(
        "JambaForCausalLM",
        "JambaConfig",
        **_SMALL,
        **_TOKENS,
        num_hidden_layers=4,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_d_conv=2,
        mamba_expand=2,
        mamba_dt_rank=4,
    )
    return model, {"input_ids": tokens(1, 30)}


MODELS = [t5, bart, whisper, mllama, llava, qwen2_vl, gemma4, jamba]
#: 5.2 has no Gemma 4, and keeps Jamba's layers in a cache class of its own.
NEEDS_NEWER = {gemma4, jamba}
SEQ2SEQ = {t5, bart, whisper}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_same_tokens_as_dynamic_cache_with_every_attention(make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    if make in NEEDS_NEWER and not CROP_REMOVES:
        pytest.skip("not in this release, or kept in a cache class of the model's own")
    model, inputs = make()

    def generate(new: Callable[[], Any]) -> Any:
        cache = EncoderDecoderCache(new(), new()) if make in SEQ2SEQ else new()
        options = {"max_new_tokens": 20, "do_sample": False} | ({} if make is whisper else {"eos_token_id": None})
        return model.generate(**inputs, past_key_values=cache, **options)

    expected = generate(lambda: DynamicCache(config=model.config))
    for attention in ("eager", "sdpa", "paged_kv"):
        model.set_attn_implementation(attention)
        assert torch.equal(generate(lambda: PagedCache(config=model.config, page_size=3)), expected), attention
        if make is not jamba:  # `DynamicCache` cannot learn of linear layers without a config either
            assert torch.equal(generate(lambda: PagedCache(page_size=3)), expected), attention
    paged_kv.detach(model)
    assert torch.equal(generate(lambda: PagedCache.for_model(model, page_size=3)), expected)


def test_cross_attention_layers_far_longer_than_the_rest_stay_whole_while_the_others_are_cropped() -> None:
    model, inputs = mllama()
    cache = PagedCache.for_model(model, page_size=3)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cross = [cache.layers[layer].keys.clone() for layer in (1, 3)]
        cache.crop_layer(0, keep_last=4)
        cache.crop_layer(2, keep_last=6)
        after = {"input_ids": tokens(1, 2), "attention_mask": torch.ones(1, 11, dtype=torch.long)}
        after["cross_attention_mask"] = torch.ones(1, 2, 1, 1, dtype=torch.long)
        logits = model(**after, position_ids=torch.tensor([[9, 10]]), past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    assert [cache.get_seq_length(layer) for layer in range(4)] == [6, cross[0].shape[2], 8, cross[1].shape[2]]
    assert all(torch.equal(cache.layers[layer].keys, old) for layer, old in zip((1, 3), cross, strict=True))
    cache.check()
