"""What compression costs in quality: perplexity of held text, retrieval of a needle, tokens equal to uncompressed ones.

Held text is a licence that every Debian system has, or else a topic of Python's documentation, from its middle on; the
needle is a sentence among sentences of the same. Nothing is fetched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from bench.compression.throughput import Load, methods
from bench.workloads import token_stream
from paged_kv import PagedCache, detach
from paged_kv.compression import compress, record_queries
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams

NEEDLE = "The secret number of the lighthouse keeper is {}."
QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number alone."
SECRETS = (7391, 2846, 5108)


def run(net: Any, tokenizer: Any, load: Load, names: list[str] | None, depths: Sequence[float]) -> None:
    """Print one table: a line for each method."""
    chosen = {name: how for name, how in methods(net, load).items() if names is None or name in names}
    stream = token_stream(tokenizer)
    print(f"prompts of {load.prompt_len} tokens, budget {load.budget} a layer; perplexity of the 256 tokens after them")
    haystacks = [
        [_haystack(tokenizer, stream, load.prompt_len, secret, depth, number) for number, secret in enumerate(SECRETS)]
        for depth in depths
    ]
    shown = [f"needle at {depth:.0%}" for depth in depths]
    print(f"| method | perplexity | {' | '.join(shown)} |\n| --- | --- {'| --- ' * len(shown)}|")
    for name, (lanes, compression) in chosen.items():
        cells = [f"{perplexity(net, stream, load, lanes, compression):.2f}"]
        cells += [needle(net, tokenizer, haystack, lanes, compression) for haystack in haystacks]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


@torch.inference_mode()
def perplexity(net: Any, stream: list[int], load: Load, lanes: Any, compression: Any, held: int = 256) -> float:
    """Of `held` tokens after the prompt, given what a crop at its end leaves; the mean of three places."""
    losses = []
    for place in range(3):
        start = len(stream) // 4 * (place + 1)
        ids = torch.tensor([stream[start : start + load.prompt_len + held]])
        cache = PagedCache.for_model(net, lanes=lanes)
        if compression is not None:
            record_queries(cache, compression.policy)
        logits = net(ids[:, : load.prompt_len], past_key_values=cache, logits_to_keep=1).logits
        if compression is not None:
            crops = compression.for_layers(cache.memory.layers)
            compress(cache, crops.policy, crops.budgets)
        positions = torch.arange(load.prompt_len, ids.shape[1])[None]
        rest = net(ids[:, load.prompt_len :], past_key_values=cache, position_ids=positions).logits
        predicted = torch.cat([logits, rest[:, :-1]], dim=1)[0].float()
        losses.append(torch.nn.functional.cross_entropy(predicted, ids[0, load.prompt_len :]).item())
    detach(net)
    return math.exp(sum(losses) / len(losses))


def needle(net: Any, tokenizer: Any, haystacks: list[list[int]], lanes: Any, compression: Any) -> str:
    """In how many haystacks, which end in the question, the model finds the secret."""
    found = 0
    tables = net.config.num_hidden_layers * (net.config.num_key_value_heads if lanes == "head" else 1)
    pages = 1 + tables * sum(-(-(len(ids) + 64) // 16) for ids in haystacks)
    options = EngineOptions(num_pages=pages, lanes=lanes, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=12, temperature=0.0, compression=compression)
    with Engine(net, tokenizer, options) as engine:
        for number, ids in enumerate(haystacks):
            engine.add_request(str(number), ids, params)
        while engine.has_unfinished:
            for result in engine.step():
                found += str(SECRETS[int(result.request_id)]) in re.sub(r"[,\s]", "", result.text)
    return f"{found} of {len(SECRETS)}"


def _haystack(tokenizer: Any, filler: list[int], length: int, secret: int, depth: float, number: int) -> list[int]:
    """A chat of `length` tokens: text with the needle in it at a depth (0 is the beginning), then the question."""
    start = len(filler) // 5 * (number + 1)

    def chat(around: int) -> list[int]:
        cut = start + int(around * depth)
        text = tokenizer.decode(filler[start:cut]) + "\n" + NEEDLE.format(secret) + "\n"
        text += tokenizer.decode(filler[cut : start + around]) + "\n\n" + QUESTION
        messages = [{"role": "user", "content": text}]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(shown, add_special_tokens=False)["input_ids"])

    around = length
    while len(ids := chat(around)) > length:
        around -= max(1, len(ids) - length)
    return ids
