"""How an engine is set up.

Owns: the engine's options and their defaults.
Does not know: how any of them is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of an engine; all have defaults that fit an offline batch.

    Attributes:
        num_pages: Pages of a fixed pool, null page included; at most one of the three sizes may be given.
        kv_cache_bytes: Bytes of a fixed pool.
        memory_fraction: Share of the free memory that the pool may grow to; 0.9 if no size is given.
        page_size: Tokens of a page.
        lanes: "head" gives every KV head its own page table, for methods that crop by head.
        max_num_seqs: Most sequences that run at once.
        max_num_batched_tokens: Most tokens of one forward pass.
        max_model_len: Most tokens of a sequence, prompt and output; the model's positions by default.
        enable_prefix_caching: Whether requests share the pages of equal prefixes.
        watermark: Share of the pool that admission leaves to the requests that already run.
        backend: Attention backend by name; "auto" takes the fastest one that works here.
        optimize: Pack the model's weights for the CPU while the engine is open.
        num_draft_tokens: Most tokens guessed ahead from the row's own text and verified in one step, for greedy rows
            while few of them run; 0 turns it off. The output is the same.
        seed: Seed of the requests that bring none; each draws differently.
    """

    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    memory_fraction: float | None = None
    page_size: int = 16
    lanes: Literal["layer", "head"] = "layer"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    backend: str = "auto"
    optimize: bool = True
    num_draft_tokens: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for option in fields(self):
            _check_kind(option.name, getattr(self, option.name), str(option.type))
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {self.watermark}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {self.max_model_len}")
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be at least 0, got {self.num_draft_tokens}")


#: What an option of a type may be, and what that is called.
_KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),
    "float": (Real, "a number"),
    "int": (Integral, "an integer"),
    "str": (str, "a string"),
}


def _check_kind(name: str, value: Any, declared: str) -> None:
    """Raise unless a value is of the type that its option is declared with."""
    kind, called = _KINDS.get(declared.removesuffix(" | None"), (object, ""))
    if value is None and declared.endswith("None"):
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} must be {called}, got {value!r}")


#: vLLM's names for options that are here under another.
_RENAMED = {
    "block_size": "page_size",
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "num_gpu_blocks_override": "num_pages",
}
#: vLLM's options that change nothing here: there are no graphs to capture, no workers, no swap space, no log.
_WITHOUT_EFFECT = frozenset(
    {
        "async_scheduling",
        "compilation_config",
        "cpu_offload_gb",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enforce_eager",
        "limit_mm_per_prompt",
        "max_logprobs",
        "max_seq_len_to_capture",
        "scheduling_policy",
        "swap_space",
        "tokenizer_mode",
    }
)
#: vLLM's options of which only one value means what this engine does.
_ONLY: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "enable_lora": (False, None),
    "hf_overrides": (None, {}),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "override_generation_config": (None, {}),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "runner": ("auto", "generate"),
    "speculative_config": (None,),
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_revision": (None,),
}
#: What goes to `from_pretrained`, and under which name.
_LOADING = {
    "download_dir": "cache_dir",
    "hf_token": "token",
    "revision": "revision",
    "trust_remote_code": "trust_remote_code",
}


def options_of(given: Mapping[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
    """An engine's options from keyword arguments, under this package's names or vLLM's; and how to load the model.

    Raises:
        TypeError: An unknown name, or one option under two names.
        ValueError: A value out of range, or one of vLLM's that asks for what is not here.
    """
    known = {field.name for field in fields(EngineOptions)}
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in _LOADING or name in _WITHOUT_EFFECT:
            continue
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise ValueError(f"{name}={value!r} is not supported: {' or '.join(map(repr, _ONLY[name]))} only")
            continue
        own = _RENAMED.get(name, name)
        if own not in known:
            raise TypeError(f"unknown option {name!r}; there are {', '.join(sorted(known))}")
        if own in settings:
            raise TypeError(f"{name} is another name of {own}: give one")
        settings[own] = value
    # vLLM takes None for "decide yourself".
    settings = {name: value for name, value in settings.items() if value is not None}
    how = {own: given[name] for name, own in _LOADING.items() if given.get(name) is not None}
    return EngineOptions(**settings), how
