"""A model and its tokenizer from where a user says they are.

Owns: paths, names and dtypes to loaded models; what can go wrong with them.
Does not know: engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allocator import KVError
from paged_kv.engine.params import SamplingParams

#: Spellings of dtypes beyond torch's own.
_DTYPES = {"float": "float32", "half": "float16"}


class ModelNotFound(KVError):
    """Raised when no model can be loaded from a path. Do: check the path; it is named with what was wrong."""


def load_model(path: str | Path, dtype: Any, **arguments: Any) -> Any:
    """Load a decoder from a folder, or by a name that the Hub's cache (or the Hub) knows.

    Raises:
        ModelNotFound: There is none, or it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    wanted = dtype_of(dtype)
    try:
        if wanted is not None:
            arguments["dtype"] = wanted
        return AutoModelForCausalLM.from_pretrained(str(path), **arguments)
    except (OSError, ValueError) as error:
        raise ModelNotFound(_why(path, error)) from error


def load_tokenizer(path: str | Path, *, needed: bool = False, **arguments: Any) -> Any:
    """Load the tokenizer of a folder or name; None if it has none.

    Raises:
        ModelNotFound: It has none, and one is needed.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), **arguments)
    except (OSError, ValueError) as error:
        if needed:
            raise ModelNotFound(f"no tokenizer could be loaded from {str(path)!r}: {_first_line(error)}") from error
        return None


def dtype_of(dtype: Any) -> torch.dtype | None:
    """A torch dtype by any of its names; None for "auto" (as saved).

    Raises:
        ValueError: No such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    found = getattr(torch, _DTYPES.get(dtype, dtype), None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return found


def default_params(model: Any) -> SamplingParams:
    """Sampling parameters from a model's generation config: its own values if it samples, else temperature 1."""
    config = getattr(model, "generation_config", None)
    if config is None or not getattr(config, "do_sample", False):
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(config, name, None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    if (most := getattr(config, "max_new_tokens", None)) is not None:
        given["max_tokens"] = most
    return SamplingParams(**given)


def _why(path: str | Path, error: Exception) -> str:
    """Why a model could not be loaded, in one line."""
    name = str(path)
    if not name:
        return "the path is empty"
    if Path(name).is_dir():
        return f"no model could be loaded from the folder {name!r}: {_first_line(error)}"
    if Path(name).exists():
        return f"{name!r} is a file: a model is a folder with config.json and its weights"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return f"there is no folder {name!r}"
    return f"there is no folder {name!r}, and no model of that name in the Hub's cache or to be had from the Hub"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
