"""Models of whose attention several operations are one: the same tokens, and only where it is the same computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import VOCAB, alone, prompts
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from paged_kv.attention.cpu import build
from paged_kv.engine import LLM, SamplingParams
from paged_kv.optimize import FusedAttention, FusedMLP, optimize_for_cpu

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: A config, and how many of its two layers have a fused attention.
FAMILIES: dict[str, tuple[Any, int]] = {
    "llama": (lambda: LlamaConfig(**_COMMON), 2),
    "llama with biases": (lambda: LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True), 2),
    "mistral": (lambda: MistralConfig(**_COMMON, sliding_window=7), 2),
    "qwen2": (lambda: Qwen2Config(**_COMMON), 2),
    "layers without rotation": (lambda: SmolLM3Config(**_COMMON, no_rope_layers=[1, 0]), 1),
    "norms of queries and keys": (lambda: Qwen3Config(**_COMMON, head_dim=32), 0),
    "norms across heads": (lambda: Olmo2Config(**_COMMON), 0),
    "clipping": (lambda: OlmoConfig(**_COMMON, clip_qkv=8.0), 0),
    "interleaved rotation": (lambda: CohereConfig(**_COMMON), 0),
    "partial rotation": (lambda: GlmConfig(**_COMMON, head_dim=32, partial_rotary_factor=0.5), 0),
    "one weight for all": (lambda: Phi3Config(**_COMMON), 0),
}


def small(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][0]()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.1)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model.to(dtype)


@pytest.fixture(autouse=True)
def _own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is best on the processor at hand, these tests are about the kernel."""
    monkeypatch.setattr("paged_kv.optimize.best_method", lambda dtype: "kernel")


def num_fused(model: nn.Module, cls: type) -> int:
    return sum(isinstance(module, cls) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate_whether_or_not_a_family_is_fused(family: str) -> None:
    model, batch = small(family), prompts(6)
    expected = [alone(model, prompt, 12) for prompt in batch]
    with LLM(model, num_pages=2000, page_size=4) as llm:
        assert num_fused(model, FusedAttention) == FAMILIES[family][1]
        results = llm.generate(batch, GREEDY, use_tqdm=False)
    assert [list(result.token_ids) for result in results] == expected
    assert num_fused(model, FusedAttention) == 0


@pytest.mark.parametrize("family", ["llama", "llama with biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 17, 200])
@torch.inference_mode()
def test_states_are_those_of_the_parts_to_rounding(family: str, dtype: torch.dtype, rows: int) -> None:
    model = small(family, dtype)
    x = torch.randn(1, rows, 128).to(dtype)
    cos, sin = model.model.rotary_emb(x, torch.arange(rows)[None] * 3)
    with LLM(model, num_pages=100):
        attention = model.model.layers[1].self_attn
        assert isinstance(attention, FusedAttention)
        query, key, value = attention.project(x, (cos, sin))
        for name, states in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            plain = getattr(attention, name)(x).view(1, rows, -1, 32).transpose(1, 2)
            if name != "v_proj":
                half = torch.cat((-plain[..., 16:], plain[..., :16]), dim=-1)
                plain = plain * cos[:, None] + half * sin[:, None]
            limit = 4e-7 * plain.abs().max() if dtype == torch.float32 else 0
            torch.testing.assert_close(states, plain, rtol=0, atol=float(limit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 6, 24, 64, 80])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_heads_of_any_width_are_turned(dtype: torch.dtype, width: int, rows: int) -> None:
    q, k, v = (torch.randn(heads * width, 40).to(dtype) for heads in (6, 2, 3))
    x, cos, sin = torch.randn(rows, 40).to(dtype), *torch.randn(2, rows, width).to(dtype)
    packs = [torch.ops.paged_kv.pack_linear(weight) for weight in (q, k, v)]
    columns = [len(q), len(k), len(v)]
    states = torch.ops.paged_kv.qkv(x, packs[0], None, packs[1], None, packs[2], None, cos, sin, columns)
    for pack, number, state, turned in zip(packs, columns, states, (True, True, False), strict=True):
        plain = torch.ops.paged_kv.linear(x, pack, None, number).unflatten(-1, (-1, width))
        if turned:
            half = torch.cat((-plain[..., width // 2 :], plain[..., : width // 2]), dim=-1)
            plain = plain * cos[:, None] + half * sin[:, None]
        torch.testing.assert_close(
            state, plain.flatten(1), rtol=0, atol=1e-5 if dtype == torch.float32 else 0, check_stride=False
        )


def test_without_an_engine_attention_stays_as_it_is() -> None:
    model = small("llama")
    handle = optimize_for_cpu(model)
    assert (num_fused(model, FusedAttention), num_fused(model, FusedMLP)) == (0, 2)
    handle.undo()
    assert num_fused(model, FusedMLP) == 0


def test_hooks_on_attention_and_its_parts_still_run_and_change_no_token() -> None:
    model, batch = small("llama"), prompts(3)
    expected = [alone(model, prompt, 12) for prompt in batch]
    seen: set[str] = set()
    with LLM(model, num_pages=2000, page_size=4) as llm:
        layers = model.model.layers
        for name, module in {
            "whole": layers[0].self_attn,
            "block": layers[0].mlp,
            "q": layers[0].self_attn.q_proj,
            "o": layers[1].self_attn.o_proj,
            "up": layers[1].mlp.up_proj,
        }.items():
            module.register_forward_hook(lambda module, args, out, name=name: seen.add(name))
        results = llm.generate(batch, GREEDY, use_tqdm=False)
    assert [list(result.token_ids) for result in results] == expected
    assert seen == {"whole", "block", "q", "o", "up"}


def test_a_projection_that_is_replaced_while_the_engine_is_open_is_used() -> None:
    model, prompt = small("llama"), prompts(1)[0]
    with LLM(model, num_pages=2000, page_size=4, enable_prefix_caching=False) as llm:
        before = llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids
        attention = model.model.layers[0].self_attn
        kept, attention.v_proj = attention.v_proj, nn.Linear(128, 64, bias=False)
        changed = llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids
        attention.v_proj = kept
        after = llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids
    assert list(after) == list(before)
    assert list(changed) != list(before)


def test_the_operation_names_what_does_not_fit() -> None:
    pack = torch.ops.paged_kv.pack_linear
    q, k, deep = pack(torch.randn(64, 20)), pack(torch.randn(32, 20)), pack(torch.randn(32, 21))
    x, cos = torch.randn(2, 20), torch.randn(2, 16)

    def call(x=x, k=k, v=k, cos=cos, sin=cos, columns=(64, 32, 32)):
        return torch.ops.paged_kv.qkv(x, q, None, k, None, v, None, cos, sin, columns)

    assert [state.shape[1] for state in call()] == [64, 32, 32]
    for change, message in [
        ({"columns": (64, 32)}, "columns must be three numbers"),
        ({"columns": (64, 32, 320)}, "v has shape"),
        ({"v": deep}, "q, k and v must be equally deep, but are 20, 20 and 21"),
        ({"cos": torch.randn(2, 48), "sin": torch.randn(2, 48)}, "cos is 48 wide, which does not divide 64 and 32"),
        ({"cos": torch.randn(2, 1), "sin": torch.randn(2, 1)}, "cos is 1 wide"),
        ({"sin": torch.randn(1, 16)}, "cos and sin must have 2 rows"),
        ({"sin": torch.randn(2, 16).double()}, "cos and sin must be Float"),
        ({"x": torch.randn(2, 19)}, r"x must be Float \[..., 20\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**change)
