"""Every press of kvpress at ratio 0.5 or near it, and the small random model that they run on.

Presses that download something (filters, gates, budget curves, head patterns) are given random numbers instead: what is
measured is memory and exactness, which hold for any numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, WIDTH, HIDDEN = 4, 4, 16, 64
#: Learnt tokens that RestoreKV adds.
RESTORED = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One press variant.

    Attributes:
        name: What the table calls it.
        make: Builds the press; given the model.
        kind: "layers" for equal counts, "uneven" for counts by layer, "heads", "channels", "decoding".
        attention: The attention that it needs.
        refused: Why it is refused on pages, if it is.
        appended: Tokens that it adds to the prompt's, or takes away.
    """

    name: str
    make: Callable[[Any], Any]
    kind: str = "layers"
    attention: str = "sdpa"
    refused: str = ""
    appended: int = 0


def model() -> Any:
    """A random Llama of four layers, 8 query and 4 KV heads of 16 channels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def prompt(length: int) -> Tensor:
    """Random ids `[1, length]`, none twice: equal tokens have equal scores, and chance decides between these."""
    return 5 + torch.randperm(40000, generator=torch.Generator().manual_seed(3))[None, :length]


def catalog() -> list[Entry]:
    """All variants. Needs kvpress."""
    import kvpress as k

    snap = {"window_size": 16}
    decoding = {"compression_interval": 4, "target_size": 128, "hidden_states_buffer_size": 64}
    return [
        Entry("RandomPress", lambda m: k.RandomPress(0.5, seed=1)),
        Entry("KnormPress", lambda m: k.KnormPress(0.5)),
        Entry("SnapKVPress", lambda m: k.SnapKVPress(0.5, **snap)),
        Entry("ExpectedAttentionPress", lambda m: k.ExpectedAttentionPress(0.5)),
        Entry("ExpectedAttentionStatsPress", lambda m: _expected_stats(k)),
        Entry("StreamingLLMPress", lambda m: k.StreamingLLMPress(0.5)),
        Entry("TOVAPress", lambda m: k.TOVAPress(0.5)),
        Entry("QFilterPress", lambda m: _qfilter(k)),
        Entry("LagKVPress", lambda m: k.LagKVPress(0.5, lag_size=32)),
        Entry("KeyDiffPress", lambda m: k.KeyDiffPress(0.5)),
        Entry("NonCausalAttnPress", lambda m: k.NonCausalAttnPress(0.5)),
        Entry("CURPress", lambda m: k.CURPress(0.5)),
        Entry("KVzapPress", lambda m: _kvzap(k)),
        Entry("CapPress", lambda m: k.CapPress(0.5)),
        Entry("CriticalKVPress(SnapKV)", lambda m: k.CriticalKVPress(k.SnapKVPress(0.5, **snap))),
        Entry("LeverageScorePress", lambda m: k.LeverageScorePress(0.5)),
        Entry("CompactorPress", lambda m: k.CompactorPress(0.5)),
        Entry("ObservedAttentionPress", lambda m: k.ObservedAttentionPress(0.5), attention="eager"),
        Entry("EntropyGatedChunkKVPress", lambda m: k.EntropyGatedChunkKVPress(k.KnormPress(0.5))),
        Entry("ChunkPress(Knorm)", lambda m: k.ChunkPress(k.KnormPress(0.5), chunk_length=64)),
        Entry("BlockPress(KeyDiff)", lambda m: k.BlockPress(k.KeyDiffPress(0.5), block_size=64)),
        Entry("MergingPress(Knorm)", lambda m: k.MergingPress(k.KnormPress(0.5))),
        Entry("KeyRerotationPress(Knorm)", lambda m: k.KeyRerotationPress(k.KnormPress(0.5))),
        Entry("FinchPress", lambda m: _finch(k, m), appended=-1),
        Entry("ComposedPress(Knorm, KeyDiff)", lambda m: k.ComposedPress([k.KnormPress(0.3), k.KeyDiffPress(0.3)])),
        Entry("PyramidKVPress", lambda m: k.PyramidKVPress(0.5, window_size=8), "uneven"),
        Entry(
            "PerLayerCompressionPress(Knorm)",
            lambda m: k.PerLayerCompressionPress(k.KnormPress(), [0.8, 0.6, 0.4, 0.2]),
            "uneven",
        ),
        Entry("SimLayerKVPress", lambda m: k.SimLayerKVPress(0.0, n_recent=128), "uneven"),
        Entry("ChunkKVPress(Knorm)", lambda m: k.ChunkKVPress(k.KnormPress(0.5), chunk_length=20), "uneven"),
        Entry("KVComposePress(structured)", lambda m: k.KVComposePress(True, 0.5), "uneven"),
        Entry("AdaKVPress(SnapKV)", lambda m: k.AdaKVPress(k.SnapKVPress(0.5, **snap)), "heads"),
        Entry("CriticalAdaKVPress(SnapKV)", lambda m: k.CriticalAdaKVPress(k.SnapKVPress(0.5, **snap)), "heads"),
        Entry("DuoAttentionPress", lambda m: _duo(k), "heads"),
        Entry("LUKVPress(Knorm)", lambda m: _lukv(k), "heads"),
        Entry("FastKVzipPress", lambda m: _fastkvzip(k), "heads"),
        Entry("DMSPress(Knorm)", lambda m: _dms(k, m), "heads"),
        Entry("KVzipPress", lambda m: k.KVzipPress(0.5), "heads"),
        Entry("RestoreKVPress", lambda m: _restorekv(k, m), "heads", appended=RESTORED),
        Entry("KVgradPress", lambda m: k.KVgradPress(0.5), "heads", refused="replaces the cache's layers by its own"),
        Entry("KVComposePress(unstructured)", lambda m: k.KVComposePress(False, 0.5), "heads"),
        Entry("ThinKPress", lambda m: k.ThinKPress(0.5, window_size=16), "channels"),
        Entry("DecodingPress(Knorm)", lambda m: k.DecodingPress(k.KnormPress(), **decoding), "decoding"),
        Entry("DecodingPress(AdaKV)", lambda m: k.DecodingPress(k.AdaKVPress(k.KnormPress()), **decoding), "decoding"),
        Entry("CompressionRatioDecodingPress(Knorm)", lambda m: _ratio_decoding(k), "decoding"),
        Entry("CAMPress(Knorm)", lambda m: k.CAMPress(k.KnormPress(), **decoding), "decoding"),
        Entry(
            "PrefillDecodingPress(Pyramid, Knorm)",
            lambda m: k.PrefillDecodingPress(
                k.PyramidKVPress(0.5, window_size=8), k.DecodingPress(k.KnormPress(), **decoding)
            ),
            "decoding",
        ),
    ]


@contextmanager
def tokenizer_of(net: Any) -> Iterator[None]:
    """A folder with a tokenizer of single characters under the model's name, for presses that load one."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(32 + index): 5 + index for index in range(90)} | {"\n": 4, "?": 3}
    raw = Tokenizer(models.WordLevel(letters, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    before = net.config.name_or_path
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
        net.config.name_or_path = folder
        try:
            yield
        finally:
            net.config.name_or_path = before


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def _qfilter(k: Any) -> Any:
    class Random(k.QFilterPress):  # type: ignore[misc]
        def post_init_from_model(self, model: Any) -> None:
            self.q_filters = _random(LAYERS, HEADS, WIDTH)

    return Random(0.5)


def _expected_stats(k: Any) -> Any:
    press = k.ExpectedAttentionStatsPress(0.5)
    press.mu = _random(LAYERS, 2 * HEADS, WIDTH)
    press.cov = torch.eye(WIDTH).expand(LAYERS, 2 * HEADS, WIDTH, WIDTH).clone()
    return press


def _kvzap(k: Any) -> Any:
    class Random(k.KVzapPress):  # type: ignore[misc]
        def post_init_from_model(self, model: Any) -> None:
            torch.manual_seed(7)
            self.kvzap_model = SimpleNamespace(layers=[torch.nn.Linear(HIDDEN, HEADS) for _ in range(LAYERS)])

    return Random(0.5)


def _fastkvzip(k: Any) -> Any:
    press = k.FastKVzipPress(0.5, window_size=16)
    press.gates = [_Gate(layer) for layer in range(LAYERS)]
    return press


class _Gate(torch.nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.layer)
        return torch.rand(1, HEADS, states.shape[1], generator=generator)


def _duo(k: Any) -> Any:
    class Random(k.DuoAttentionPress):  # type: ignore[misc]
        @staticmethod
        def load_attention_pattern(model: Any) -> tuple[int, int, np.ndarray]:
            return 16, 64, np.random.default_rng(1).random((LAYERS, HEADS))

    return Random(0.5)


def _lukv(k: Any) -> Any:
    press = k.LUKVPress(k.KnormPress(), compression_ratio=0.5)
    curve = np.random.default_rng(2).uniform(0.2, 0.8, (1, LAYERS, HEADS))
    press._budget_curves = np.repeat(curve, 99, axis=0)
    return press


def _restorekv(k: Any, net: Any) -> Any:
    """Random restore tokens; the adapter that they are read with changes nothing."""

    class Random(k.RestoreKVPress):  # type: ignore[misc]
        def post_init_from_model(self, model: Any) -> None:
            self.restore_embeddings = 0.02 * _random(RESTORED, HIDDEN)

    for name in ("set_adapter", "enable_adapters", "disable_adapters"):
        setattr(net, name, lambda *args: None)
    return Random(0.5)


def _finch(k: Any, net: Any) -> Any:
    press = k.FinchPress(0.5)
    press.delimiter_token_id = 3
    return press


def _dms(k: Any, net: Any) -> Any:
    """A threshold at the median score of the first layer."""
    cache = DynamicCache()
    before = net.config._attn_implementation
    net.set_attn_implementation("sdpa")
    net(prompt(512), past_key_values=cache)
    net.set_attn_implementation(before)
    median = float(cache.layers[0].keys.norm(dim=-1).median())
    return k.DMSPress(k.KnormPress(), threshold=-median, sliding_window_size=64)


def _ratio_decoding(k: Any) -> Any:
    return k.CompressionRatioDecodingPress(k.KnormPress(), compression_interval=4, target_compression_ratio=0.5)
