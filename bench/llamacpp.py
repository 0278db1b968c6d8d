"""llama.cpp as a peer, through llama-cpp-python's low-level batch interface: 16 slots over one unified KV cache.

A batch holds a token of every slot that decodes, then pieces of prompts, 512 tokens at most. A prefix that all requests
share is computed once and copied between slots. `python -m bench.llamacpp OUT.gguf [--dtype ...]` writes the demo model
as a GGUF file of float32 or bfloat16 weights, which `--peer-model llamacpp=OUT.gguf` takes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.workloads import Job

NUM_SLOTS = 16
BATCH_TOKENS = 512
#: A common prefix shorter than this is not worth a copy.
LEAST_PREFIX = 64


@dataclass(slots=True)
class Slot:
    """A request in one of the cache's sequences.

    Attributes:
        number: Which sequence.
        job: Index of the request.
        num_done: Tokens of prompt and output that are in the cache.
    """

    number: int
    job: int
    tokens: list[int]
    num_prompt: int
    num_wanted: int
    num_done: int = 0
    output: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slots:
    """Which requests run, and what of them is in the next batch."""

    jobs: Sequence[Job]
    prefix: int
    size: int = NUM_SLOTS
    running: list[Slot] = field(default_factory=list)
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.jobs)))

    def admit(self) -> list[Slot]:
        """Put waiting requests into free slots; returns the new ones."""
        taken = {slot.number for slot in self.running}
        fresh = []
        for number in range(self.size):
            if number not in taken and self.waiting:
                index = self.waiting.popleft()
                job = self.jobs[index]
                slot = Slot(number, index, list(job.prompt), len(job.prompt), job.num_output, num_done=self.prefix)
                fresh.append(slot)
        self.running += fresh
        return fresh

    def batch(self) -> list[tuple[Slot, int]]:
        """How many tokens of each slot come next: those that decode first."""
        chosen, room = [], BATCH_TOKENS
        for slot in sorted(self.running, key=lambda slot: len(slot.tokens) - slot.num_done > 1):
            count = min(len(slot.tokens) - slot.num_done, room)
            if count:
                chosen.append((slot, count))
                room -= count
        return chosen


def common_prefix(jobs: Sequence[Job]) -> int:
    """Tokens with which all prompts begin, of each at least one left; 0 if too few to matter."""
    if len(jobs) < 2:
        return 0
    alike = (len(set(column)) == 1 for column in zip(*(job.prompt for job in jobs), strict=False))
    length = sum(itertools.takewhile(bool, alike))
    length = min(length, min(len(job.prompt) for job in jobs) - 1)
    return length if length >= LEAST_PREFIX else 0


class LlamaCpp:
    """The library with a model and, for each run, a cache for its longest requests."""

    def __init__(self, path: str, dtype: str, threads: int) -> None:
        """Load a GGUF file.

        Raises:
            ImportError: llama-cpp-python is not installed.
            ValueError: It cannot load the file.
        """
        import llama_cpp

        self._lib = llama_cpp
        self._threads = threads or os.cpu_count() or 1
        self._type = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": llama_cpp.GGML_TYPE_BF16}[dtype]
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """All requests through the slots; see `bench.peers.Peer.run`."""
        start = time.perf_counter()
        prefix = common_prefix(jobs)
        context = self._open(jobs, prefix)
        try:
            return self._run(context, jobs, prefix, start)
        finally:
            self._lib.llama_free(context)

    def _open(self, jobs: list[Job], prefix: int) -> Any:
        longest = max(len(job.prompt) + job.num_output for job in jobs)
        params = self._lib.llama_context_default_params()
        params.n_ctx = min(NUM_SLOTS, len(jobs)) * (longest + 1) + prefix
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = NUM_SLOTS + 1
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._type
        params.kv_unified = True
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        return context

    def _run(self, context: Any, jobs: list[Job], prefix: int, start: float) -> tuple[float, int, list[list[int]]]:
        lib, memory = self._lib, self._lib.llama_get_memory(context)
        shared = Slot(NUM_SLOTS, -1, list(jobs[0].prompt[:prefix]), prefix, 0)
        while shared.num_done < prefix:
            self._decode(context, [(shared, min(BATCH_TOKENS, prefix - shared.num_done))])
        slots = Slots(jobs, prefix)
        firsts, outputs = [0.0] * len(jobs), [[] for _ in jobs]
        while slots.running or slots.waiting:
            for slot in slots.admit():
                lib.llama_memory_seq_rm(memory, slot.number, -1, -1)
                if prefix:
                    lib.llama_memory_seq_cp(memory, NUM_SLOTS, slot.number, 0, prefix)
            for slot, token in self._decode(context, slots.batch()):
                slot.tokens.append(token)
                slot.output.append(token)
                firsts[slot.job] = firsts[slot.job] or time.perf_counter() - start
                if len(slot.output) == slot.num_wanted:
                    outputs[slot.job] = slot.output
                    slots.running.remove(slot)
        width = lib.llama_model_n_embd(self._model) // lib.llama_model_n_head(self._model)
        numbers = 2 * lib.llama_model_n_layer(self._model) * lib.llama_model_n_head_kv(self._model) * width
        size = 4 if self._type == lib.GGML_TYPE_F32 else 2
        return statistics.mean(firsts), lib.llama_n_ctx(context) * numbers * size, outputs

    def _decode(self, context: Any, chosen: list[tuple[Slot, int]]) -> list[tuple[Slot, int]]:
        """One forward pass; returns the likeliest next token of the slots whose tokens are all computed."""
        import numpy as np

        batch, ends, place = self._batch, [], 0
        for slot, count in chosen:
            for position in range(slot.num_done, slot.num_done + count):
                batch.token[place], batch.pos[place] = slot.tokens[position], position
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, slot.number
                batch.logits[place] = position == len(slot.tokens) - 1
                place += 1
            slot.num_done += count
            if slot.num_done == len(slot.tokens):
                ends.append((slot, place - 1))
        batch.n_tokens = place
        status = self._lib.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
        drawn = []
        for slot, line in ends:
            logits = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, line), shape=(self._vocab,))
            drawn.append((slot, int(logits.argmax())))
        return drawn


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """Copy a GGUF file with all matrices in float32 or bfloat16."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    kind = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        value = int(getattr(gguf.LlamaFileType, "ALL_F32" if dtype == "float32" else "MOSTLY_BF16"))
        contents = value if name == "general.file_type" else entry.contents()
        writer.add_key_value(name, contents, entry.types[0], sub_type=inner)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if data.ndim > 1 and dtype == "bfloat16":
            writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the demo model."""
    from paged_kv.weights import find_gguf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parsed = parser.parse_args()
    write_gguf(find_gguf(), parsed.output, parsed.dtype)


if __name__ == "__main__":
    main()
