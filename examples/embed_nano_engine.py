"""A toy engine on `allocator` alone: no torch, no model, but every decision that a serving loop has to make.

It replays a trace of requests with continuous batching: prompts share prefixes, some requests branch into forks, long
ones are cropped layer by layer, and when pages run out the youngest is preempted and starts again. What a real engine
adds is marked with ``real engine:``.  Run it: ``python examples/embed_nano_engine.py``
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from allocator import BlockAllocator, OutOfPages, Plan, SeqId, Verdict

LAYERS, PAGE_SIZE = 4, 4
CLOSED = SeqId(0)


@dataclass(eq=False)
class Request:
    """What a user asked for, and how far it is. The newest of `tokens` has no slot yet."""

    prompt: list[int]
    max_tokens: int
    forks: int = 0
    tokens: list[int] = field(default_factory=list)
    seq: SeqId = CLOSED

    def sample(self) -> None:
        """Adds a token. Real engine: from the logits of the forward pass."""
        self.tokens.append(sum(self.tokens[-3:]) % 50)


class NanoEngine:
    """Continuous batching, one direction a step: admit, append (making room), run, crop, finish."""

    def __init__(self, num_pages: int, crop_at: int = 24) -> None:
        self.allocator = BlockAllocator(
            num_pages, page_size=PAGE_SIZE, num_layers=LAYERS, enable_prefix_caching=True, watermark=LAYERS
        )
        self.crop_at = crop_at
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.computed_tokens = self.crops = 0

    def apply(self, plan: Plan) -> None:
        """Carries out a plan before the next call. Real engine: copies pages and moves slots of the store."""

    def step(self) -> None:
        """One forward pass for everything that runs."""
        self.admit()
        while True:
            try:
                self.apply(self.allocator.append([request.seq for request in self.running], 1))
                break
            except OutOfPages:
                self.preempt(self.running[-1])
        self.computed_tokens += len(self.running)
        for request in list(self.running):
            request.sample()  # real engine: one packed forward over block_tables, slot_mapping and live_lens
            self.after_forward(request)

    def admit(self) -> None:
        """Starts waiting requests while they fit above the watermark."""
        while self.waiting:
            request = self.waiting[0]
            tokens = request.tokens or list(request.prompt)
            opened = self.allocator.open(tokens)
            missing = len(tokens) - opened.num_cached_tokens
            answer = self.allocator.can_append([opened.seq], missing)
            if answer.verdict is not Verdict.OK:
                self.allocator.close(opened.seq)
                if answer.verdict is Verdict.NEVER or not self.running:
                    raise OutOfPages(answer.needed, answer.available, answer.total)
                return
            self.apply(self.allocator.append([opened.seq], missing))
            self.computed_tokens += missing  # real engine: the prefill, in chunks
            request.seq, request.tokens = opened.seq, tokens
            request.sample()
            self.running.append(self.waiting.popleft())
            self.after_forward(request)

    def after_forward(self, request: Request) -> None:
        """Finishes a request, or publishes, forks and crops it."""
        if len(request.tokens) >= len(request.prompt) + request.max_tokens:
            self.apply(self.allocator.close(request.seq))
            self.running.remove(request)
            self.finished.append(request)
            return
        self.allocator.commit(request.seq, request.tokens[:-1])
        for child in self.allocator.fork(request.seq, request.forks):
            self.running.append(Request(request.prompt, request.max_tokens, tokens=list(request.tokens), seq=child))
        request.forks = 0
        self.crop(request)

    def crop(self, request: Request) -> None:
        """Two sinks and the newest tokens stay; deeper layers keep less."""
        live = self.allocator.live_lens([request.seq])[:, 0].tolist()
        budgets = [max(6, self.crop_at // 2 - 2 * layer) for layer in range(LAYERS)]
        if max(live) < self.crop_at:
            return
        keep = {layer: [0, 1, *range(n - budgets[layer] + 2, n)] for layer, n in enumerate(live) if n > budgets[layer]}
        try:
            self.apply(self.allocator.crop(request.seq, keep))
            self.crops += 1
        except OutOfPages:  # survivors would have to leave shared pages and no page is left: try again next step
            pass

    def preempt(self, request: Request) -> None:
        """Takes the pages of a request back; what it published is found again when it restarts."""
        self.apply(self.allocator.preempt(request.seq))
        self.running.remove(request)
        self.waiting.appendleft(request)


def trace(num_requests: int, seed: int) -> list[Request]:
    """Requests with one of three system prompts each."""
    rng = random.Random(seed)
    systems = [[rng.randrange(50) for _ in range(12)] for _ in range(3)]
    return [
        Request(
            rng.choice(systems) + [rng.randrange(50) for _ in range(rng.randrange(1, 10))],
            max_tokens=rng.randrange(4, 24),
            forks=rng.choice([0, 0, 0, 1, 2]),
        )
        for _ in range(num_requests)
    ]


def main(num_requests: int = 40, num_pages: int = 140, seed: int = 0) -> NanoEngine:
    """Replays a trace, checking every invariant after every step."""
    engine = NanoEngine(num_pages)
    engine.waiting.extend(trace(num_requests, seed))
    while engine.waiting or engine.running:
        engine.step()
        engine.allocator.check()
    return engine


if __name__ == "__main__":
    done = main()
    print(f"{len(done.finished)} finished, {done.computed_tokens} tokens computed, {done.crops} crops")  # noqa: T201
    print(done.allocator.stats())  # noqa: T201
