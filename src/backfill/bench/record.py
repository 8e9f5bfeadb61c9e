"""A request of the load and its measurements. All times are in seconds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request of the load.

    Attributes:
        prompt: token ids.
        input_tokens: length of the prompt as the client knows it.
        output_tokens: the most tokens to generate.
        due_at_s: when the request arrives, from the start of the run.
    """

    prompt: list[int]
    input_tokens: int
    output_tokens: int
    due_at_s: float = 0.0


class Outcome(Enum):
    """How a request ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # by the user: neither a success nor a miss


@dataclass(slots=True)
class RequestRecord:
    """One request's measurements.

    Attributes:
        due_at_s: when the request was to arrive, from the start of the run.
        sent_at_s: when it was sent, from the start of the run.
        chunk_after_s: receipt of each chunk with ``choices``, from ``sent_at_s``.
        input_tokens, output_tokens: the server's ``usage``, if it sends one; else chunks are counted.
        ended_after_s: end of the response or failure, from ``sent_at_s``.
    """

    due_at_s: float
    input_tokens: int
    sent_at_s: float | None = None
    chunk_after_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    ended_after_s: float = 0.0
    outcome: Outcome = Outcome.RUNNING
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Send to first chunk with ``choices``, as in ``vllm bench serve``."""
        return self.chunk_after_s[0] if self.chunk_after_s else 0.0

    @property
    def latency_s(self) -> float:
        """Send to last chunk with ``choices`` (E2EL)."""
        return self.chunk_after_s[-1] if self.chunk_after_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks."""
        times = self.chunk_after_s
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for an output of fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)
