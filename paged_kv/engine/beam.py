"""Beam search over forks.

Owns: which beams go on, which are finished, when to stop. The rule is that of transformers' `generate(num_beams=...)`.
Does not know: pages; it names parents and tokens, the engine forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Child:
    """A beam of the next step: `parent` is the index of its beam now, `score` its summed log probability."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam: output tokens and length-normalised score."""

    tokens: tuple[int, ...]
    score: float
    logprob: float
    reason: str


@dataclass(slots=True)
class BeamSearch:
    """The state of one request's search.

    Attributes:
        width: Beams that are kept.
        stops: Tokens that finish a beam.
        scores: Summed log probability of each running beam.
        finished: The best finished beams, best first, at most `width`.
        num_rows: Rows forked so far; each beam row has its own index.
    """

    width: int
    length_penalty: float
    stops: frozenset[int]
    max_tokens: int
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    num_rows: int = 0

    def advance(self, logprobs: Tensor, outputs: Sequence[Sequence[int]]) -> list[Child]:
        """Take one step.

        Args:
            logprobs: `[beams, vocab]` of the running beams.
            outputs: Output tokens of the running beams so far.

        Returns:
            The beams of the next step, best first; none when the search is over.
        """
        vocab = logprobs.shape[-1]
        total = logprobs + logprobs.new_tensor(self.scores).unsqueeze(1)
        number = min(max(2, 1 + len(self.stops)) * self.width, total.numel())
        best = total.flatten().topk(number)
        length = len(outputs[0]) + 1
        children: list[Child] = []
        for rank, (flat, score) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
            parent, token = divmod(flat, vocab)
            ends = token in self.stops
            if (ends or length >= self.max_tokens) and rank < self.width:
                reason = "stop" if ends else "length"
                self._finish((*outputs[parent], token), score, reason)
            elif not ends and len(children) < self.width:
                children.append(Child(parent, token, score))
        if length >= self.max_tokens or self._settled(children, length):
            return []
        self.scores = [child.score for child in children]
        return children

    def _finish(self, tokens: tuple[int, ...], logprob: float, reason: str) -> None:
        score = logprob / len(tokens) ** self.length_penalty
        self.finished.append(Hypothesis(tokens, score, logprob, reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]

    def _settled(self, children: Sequence[Child], length: int) -> bool:
        """Whether no running beam can still beat the worst of a full set of finished ones."""
        if not children:
            return True
        if len(self.finished) < self.width:
            return False
        return bool(self.finished[-1].score >= children[0].score / length**self.length_penalty)
