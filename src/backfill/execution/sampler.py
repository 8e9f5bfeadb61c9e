"""Requests' tokens, and the next ones from logits, for a batch whose requests sample in different ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backfill.core.plan import AdmittedRequest, TokenLogprobs
from backfill.core.sampling import SamplingParams
from backfill.execution.grammar_masks import OutputGrammar
from backfill.execution.shaping import add_biases, exclude, penalise
from backfill.kernels.base import Kernels
from backfill.kernels.sampling import RowSampling

_MASK_64 = (1 << 64) - 1


class RequestState:
    """A request's tokens, prompt first, in a buffer that never moves, and how to sample the next.

    Args:
        grammar: of its output, on the rank that samples; None without one.
    """

    __slots__ = (
        "_tokens",
        "allowed_token_ids",
        "grammar",
        "num_prompt_tokens",
        "num_scored_rows",
        "num_tokens",
        "sampling",
    )

    def __init__(self, admitted: AdmittedRequest, grammar: OutputGrammar | None = None) -> None:
        sampling = admitted.sampling
        self.sampling: SamplingParams = sampling
        self.grammar = grammar
        self.num_prompt_tokens = len(admitted.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_scored_rows = 0  # leading ones
        assert sampling.max_tokens is not None
        self._tokens = np.empty(self.num_prompt_tokens + sampling.max_tokens, dtype=np.int64)
        self._tokens[: self.num_tokens] = admitted.prompt_token_ids
        allowed = sampling.allowed_token_ids
        self.allowed_token_ids = None if allowed is None else np.array(allowed, dtype=np.int64)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """A view of the tokens at positions ``[start, end)``."""
        assert end <= self.num_tokens, f"tokens up to {end} asked for, {self.num_tokens} known"
        return self._tokens[start:end]

    def take_unscored(self, start: int, end: int) -> range:
        """Positions in ``[start, end)`` before prompt tokens to score. They count as scored from now on."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        positions = range(max(start, self.num_scored_rows), min(end, self.num_prompt_tokens - 1))
        self.num_scored_rows = max(self.num_scored_rows, positions.stop)
        return positions

    def append(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.grammar is not None:
            self.grammar.append(token_id)


@dataclass(frozen=True, slots=True)
class ForbiddenTokens:
    """What grammars do not allow.

    Attributes:
        rows: of the logits, ascending: those whose requests have a grammar.
        tokens: of these rows, bool ``[len(rows), vocab]``; some token of each is allowed.
    """

    rows: Sequence[int]
    tokens: Tensor

    def exclude(self, logits: Tensor) -> None:
        """Make them impossible, in place."""
        if len(self.rows) == len(logits):
            logits.masked_fill_(self.tokens, -math.inf)
        else:
            logits[self.rows] = logits[self.rows].masked_fill_(self.tokens, -math.inf)

    def of(self, rows: Sequence[int]) -> ForbiddenTokens:
        """Of these rows of the logits alone, by their places among them."""
        places = {row: place for place, row in enumerate(rows)}
        kept = [index for index, row in enumerate(self.rows) if row in places]
        return ForbiddenTokens([places[self.rows[index]] for index in kept], self.tokens[kept])

    def restore_empty(self, logits: Tensor) -> None:
        """In rows that have no possible token, make all that are allowed equally likely."""
        for index, row in enumerate(self.rows):
            if bool(logits[row].amax() == -math.inf):
                logits[row].masked_fill_(~self.tokens[index], 0.0)


class Sampler:
    """Stateless: a token depends on its logits and its request alone, never on the rest of the batch.

    ``end_token_ids`` are suppressed, with a request's own stop tokens, before its ``min_tokens``.
    """

    def __init__(self, kernels: Kernels, end_token_ids: Sequence[int]) -> None:
        self._kernels = kernels
        self._end_token_ids = tuple(end_token_ids)

    def sample(
        self, logits: Tensor, states: Sequence[RequestState], forbidden: ForbiddenTokens | None = None
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """One (token id, log probabilities if asked for) for each row of ``logits [N, vocab]``."""
        if forbidden is not None:
            forbidden.exclude(logits)
        shaped = [row for row, state in enumerate(states) if state.sampling.shapes_logits]
        if shaped:
            token_ids = dict(zip(shaped, self._of_shaped(logits, states, shaped, forbidden), strict=True))
            plain = [row for row in range(len(states)) if row not in token_ids]
            how = row_sampling([states[row] for row in plain])
            token_ids.update(zip(plain, self._kernels.sample(logits[plain], how), strict=True))
        else:
            token_ids = dict(enumerate(self._kernels.sample(logits, row_sampling(states))))
        logged = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        logprobs: dict[int, TokenLogprobs] = {}
        if logged:
            counts = [states[row].sampling.logprobs or 0 for row in logged]
            of_logged = logits if len(logged) == len(logits) else logits[logged]
            scored = self._kernels.score(of_logged, [token_ids[row] for row in logged], counts)
            logprobs.update(zip(logged, scored, strict=True))
        return [(token_ids[row], logprobs.get(row)) for row in range(len(states))]

    def _of_shaped(
        self,
        logits: Tensor,
        states: Sequence[RequestState],
        rows: Sequence[int],
        forbidden: ForbiddenTokens | None,
    ) -> list[int]:
        """Tokens of rows whose requests change their logits; ``logits`` stays as it is."""
        shaped, states = _floats(logits, rows), [states[row] for row in rows]
        add_biases(shaped, states)
        penalise(shaped, states)
        exclude(shaped, states, self._end_token_ids)
        if forbidden is not None and (forbidden := forbidden.of(rows)).rows:
            forbidden.exclude(shaped)  # a row of which nothing was left has an end token
            forbidden.restore_empty(shaped)
        return self._kernels.sample(shaped, row_sampling(states))


def _floats(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of the rows, ascending, in float32."""
    if len(rows) == len(logits):
        return logits.to(torch.float32, copy=True)
    return logits[list(rows)].float()


def row_sampling(states: Sequence[RequestState]) -> RowSampling:
    """How the next token of each request is drawn."""
    params = [state.sampling for state in states]
    uniform = [
        0.0 if state.sampling.is_greedy else uniform_at(state.sampling.seed or 0, state.num_output_tokens)
        for state in states
    ]
    return RowSampling(
        np.array([0.0 if each.is_greedy else each.temperature for each in params], np.float32),
        np.array([each.top_k for each in params], np.int64),
        np.array([each.top_p for each in params], np.float64),
        np.array([each.min_p for each in params], np.float32),
        np.array(uniform, np.float64),
    )


def uniform_at(seed: int, index: int) -> float:
    """Number ``index`` of stream ``seed``, uniform in [0, 1): a counter-based generator.

    The finaliser is that of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014), applied to the seed and then to the counter.
    """
    state = _mix((seed + 0x9E3779B97F4A7C15) & _MASK_64)
    state = _mix((state + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)
