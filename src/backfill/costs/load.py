"""The load of a step: the numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backfill.core.plan import ScheduledSlice


@dataclass(slots=True)
class StepLoad:
    """Sums over the slices of a step, updated as slices are put in and taken out.

    A slice is *decode* when it computes one token after cached ones, else *prefill*.

    Attributes:
        num_tokens: rows of every row-wise operator and matrix product.
        num_sampled: rows of the output projection and the sampler.
        num_requests: slices.
        prefill_pairs: (new token, token it attends to) pairs of prefill slices; for a slice of n tokens
            after c cached ones, n * c + n * (n + 1) / 2.
        prefill_context_tokens: cached tokens that prefill slices read.
        decode_context_tokens: cached tokens that decode slices read.
    """

    num_tokens: int = 0
    num_sampled: int = 0
    num_requests: int = 0
    prefill_pairs: int = 0
    prefill_context_tokens: int = 0
    decode_context_tokens: int = 0

    def put(self, start: int, num_tokens: int, num_sampled: int) -> None:
        """Put in a slice; ``num_sampled`` of its rows have logits."""
        if num_tokens == 1 and start > 0:  # the common case: every decode of every step
            self.num_tokens += 1
            self.num_requests += 1
            self.num_sampled += num_sampled
            self.decode_context_tokens += start
        else:
            self._add(start, num_tokens, num_sampled, 1)

    def put_decodes(self, starts: Sequence[int]) -> None:
        """``put`` of one token after each of these numbers of cached ones, at least one."""
        self.num_tokens += len(starts)
        self.num_requests += len(starts)
        self.num_sampled += len(starts)
        self.decode_context_tokens += sum(starts)

    def add(self, other: StepLoad, part: float = 1.0) -> None:
        """Put in all slices of another load, or about a part of them."""
        self.num_tokens += round(part * other.num_tokens)
        self.num_sampled += round(part * other.num_sampled)
        self.num_requests += round(part * other.num_requests)
        self.prefill_pairs += round(part * other.prefill_pairs)
        self.prefill_context_tokens += round(part * other.prefill_context_tokens)
        self.decode_context_tokens += round(part * other.decode_context_tokens)

    def take(self, start: int, num_tokens: int, num_sampled: int) -> None:
        """Undo a ``put`` of the same arguments."""
        self._add(start, num_tokens, num_sampled, -1)

    def put_prompt(self, num_tokens: int, chunk_tokens: int, num_computed: int = 0, sign: int = 1) -> None:
        """Put in the chunks of a prompt behind its computed tokens, the last with logits; -1 takes them."""
        for start in range(num_computed, num_tokens, chunk_tokens):
            is_last = start + chunk_tokens >= num_tokens
            self._add(start, min(chunk_tokens, num_tokens - start), is_last, sign)

    def become(self, other: StepLoad, start: int, num_tokens: int, num_sampled: int) -> None:
        """Be the load of another step with one more slice."""
        self.num_tokens = other.num_tokens + num_tokens
        self.num_sampled = other.num_sampled + num_sampled
        self.num_requests = other.num_requests + 1
        if num_tokens == 1 and start > 0:
            self.prefill_pairs = other.prefill_pairs
            self.prefill_context_tokens = other.prefill_context_tokens
            self.decode_context_tokens = other.decode_context_tokens + start
        else:
            pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
            self.prefill_pairs = other.prefill_pairs + pairs
            self.prefill_context_tokens = other.prefill_context_tokens + start
            self.decode_context_tokens = other.decode_context_tokens

    def copy(self) -> StepLoad:
        return StepLoad(
            self.num_tokens,
            self.num_sampled,
            self.num_requests,
            self.prefill_pairs,
            self.prefill_context_tokens,
            self.decode_context_tokens,
        )

    @classmethod
    def of(cls, slices: Iterable[tuple[int, int, bool]]) -> StepLoad:
        """Load of (start, number of tokens, samples) slices."""
        load = cls()
        for start, num_tokens, samples in slices:
            load.put(start, num_tokens, samples)
        return load

    @classmethod
    def of_decodes(cls, num_requests: int, num_context_tokens: float, max_in_step: int) -> StepLoad:
        """Load of a step that decodes requests, or as many of average context as a step may have."""
        num_in_step = min(num_requests, max_in_step)
        return cls(
            num_tokens=num_in_step,
            num_sampled=num_in_step,
            num_requests=num_in_step,
            decode_context_tokens=round(num_context_tokens * num_in_step / num_requests),
        )

    @classmethod
    def of_slices(cls, slices: Iterable[ScheduledSlice]) -> StepLoad:
        load, context_tokens, num_decodes, num_sampled = cls(), 0, 0, 0
        for _, start, num_tokens, _, samples, _ in slices:
            if num_tokens == 1 and start > 0:
                context_tokens += start
                num_decodes += 1
                num_sampled += samples
            else:
                load._add(start, num_tokens, samples, 1)
        load.num_tokens += num_decodes
        load.num_requests += num_decodes
        load.num_sampled += num_sampled
        load.decode_context_tokens += context_tokens
        return load

    def _add(self, start: int, num_tokens: int, num_sampled: int, sign: int) -> None:
        self.num_tokens += sign * num_tokens
        self.num_requests += sign
        self.num_sampled += sign * num_sampled
        if num_tokens == 1 and start > 0:
            self.decode_context_tokens += sign * start
        else:
            self.prefill_pairs += sign * (num_tokens * start + num_tokens * (num_tokens + 1) // 2)
            self.prefill_context_tokens += sign * start
