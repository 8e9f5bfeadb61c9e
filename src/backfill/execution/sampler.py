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

_MOST_LIKELY_PART = 512
_NUM_CANDIDATES = 1024  # top-p and min-p rarely keep more; rows that do are sorted whole
_MAX_ROWS_DRAWN = 32  # in one call: bounds the memory of a draw, which copies its rows
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
        "is_plain_greedy",
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
        self.is_plain_greedy = sampling.is_greedy and not sampling.shapes_logits and sampling.logprobs is None

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

    def restore_empty(self, logits: Tensor) -> None:
        """In rows that have no possible token, make all that are allowed equally likely."""
        for index, row in enumerate(self.rows):
            if bool(logits[row].amax() == -math.inf):
                logits[row].masked_fill_(~self.tokens[index], 0.0)


class Sampler:
    """Stateless: a token depends on its logits and its request alone, never on the rest of the batch.

    ``end_token_ids`` are suppressed, with a request's own stop tokens, before its ``min_tokens``.
    """

    def __init__(self, end_token_ids: Sequence[int]) -> None:
        self._end_token_ids = tuple(end_token_ids)

    def sample(
        self, logits: Tensor, states: Sequence[RequestState], forbidden: ForbiddenTokens | None = None
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """One (token id, log probabilities if asked for) for each row of ``logits [N, vocab]``."""
        if forbidden is not None:
            forbidden.exclude(logits)
        if all(state.is_plain_greedy for state in states):
            return [(token_id, None) for token_id in _most_likely(logits)]
        logits = logits.float()
        logged = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        raw_logprobs = dict(zip(logged, logits[logged].log_softmax(-1), strict=True)) if logged else {}
        add_biases(logits, states)
        penalise(logits, states)
        exclude(logits, states, self._end_token_ids)
        if forbidden is not None and any(states[row].sampling.shapes_logits for row in forbidden.rows):
            forbidden.exclude(logits)  # a shaped row of which nothing was left has an end token
            forbidden.restore_empty(logits)
        token_ids = _most_likely(logits)
        drawn = [row for row, state in enumerate(states) if not state.sampling.is_greedy]
        for start in range(0, len(drawn), _MAX_ROWS_DRAWN):
            rows = drawn[start : start + _MAX_ROWS_DRAWN]
            for row, token_id in zip(rows, _draw(logits, rows, states), strict=True):
                token_ids[row] = token_id
        return [
            (
                token_id,
                _token_logprobs(raw_logprobs[row], token_id, states[row]) if row in raw_logprobs else None,
            )
            for row, token_id in enumerate(token_ids)
        ]


def _most_likely(logits: Tensor) -> list[int]:
    """The first most likely token of each row.

    If the vocabulary divides into parts, the maximum of each part is found first: torch vectorises ``amax``,
    but not the search for an index (64 rows of 49,152: 0.8 ms; 1.5 ms with ``max`` alone).
    """
    part = math.gcd(logits.shape[-1], _MOST_LIKELY_PART)
    # Without rows, reshape cannot infer the number of parts.
    if part < _MOST_LIKELY_PART // 4 or not len(logits):
        return logits.max(-1).indices.tolist()
    parts = logits.reshape(len(logits), -1, part)
    best = parts.amax(-1).max(-1).indices
    within = parts[torch.arange(len(best), device=logits.device), best].max(-1).indices
    token_ids: list[int] = (best * part + within).tolist()
    return token_ids


def _draw(logits: Tensor, rows: Sequence[int], states: Sequence[RequestState]) -> list[int]:
    """Draw one token for each of ``rows``, with its own temperature, filters and random number."""
    params = [states[row].sampling for row in rows]
    is_filtered = [p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    uniform = torch.tensor(
        [uniform_at(states[row].sampling.seed or 0, states[row].num_output_tokens) for row in rows],
        dtype=torch.float64,
        device=logits.device,
    )
    probs = (logits[list(rows)] / temperature[:, None]).softmax(-1)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    whole = [i for i, filtered in enumerate(is_filtered) if not filtered]
    filtered = [i for i, filtered in enumerate(is_filtered) if filtered]
    if whole:
        token_ids[whole] = _invert_cdf(probs[whole], uniform[whole])
    if filtered:
        token_ids[filtered] = _draw_filtered(
            probs[filtered],
            uniform[filtered],
            top_k=torch.tensor([params[i].top_k or probs.shape[1] for i in filtered], device=logits.device),
            top_p=torch.tensor([params[i].top_p for i in filtered], device=logits.device),
            min_p=torch.tensor([params[i].min_p for i in filtered], device=logits.device),
        )
    return token_ids.tolist()


def _draw_filtered(
    probs: Tensor,
    uniform: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    num_candidates: int = _NUM_CANDIDATES,
) -> Tensor:
    """Draw from the tokens of each row of ``probs [N, vocab]`` that pass top-k, top-p and min-p.

    Only the most likely candidates are examined; a row that they do not settle is examined whole. Whether a
    row is settled depends on that row alone.
    """
    vocab_size = probs.shape[1]
    ranked, ids = probs.topk(min(num_candidates, vocab_size), dim=-1)
    kept, is_settled = _filter_ranked(ranked, vocab_size, top_k, top_p, min_p)
    chosen = _invert_cdf(torch.where(kept, ranked, 0.0), uniform)
    token_ids = ids.gather(1, chosen[:, None])[:, 0]
    if not bool(is_settled.all()):
        rest = ~is_settled
        token_ids[rest] = _draw_filtered(
            probs[rest],
            uniform[rest],
            top_k=top_k[rest],
            top_p=top_p[rest],
            min_p=min_p[rest],
            num_candidates=vocab_size,
        )
    return token_ids


def _filter_ranked(
    ranked: Tensor, vocab_size: int, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Which of the candidates ``ranked [N, C]``, most likely first, pass the filters.

    Returns (kept ``[N, C]``, settled ``[N]``): in a settled row no token beyond its candidates passes. Top-p
    is a share of the probability mass that passes top-k.
    """
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    in_top_k = ranks < top_k[:, None]
    cumulative = torch.where(in_top_k, ranked, 0.0).double().cumsum(-1)
    k_is_inside = top_k <= ranked.shape[1]
    mass = torch.where(k_is_inside, cumulative[:, -1], 1.0)  # 1.0 is exact where top-k is off
    before = cumulative - ranked
    kept = in_top_k & (before < (top_p.double() * mass)[:, None]) & (ranked >= min_p[:, None] * ranked[:, :1])
    kept[:, 0] = True
    is_settled = k_is_inside | ((top_k >= vocab_size) & ~kept[:, -1])
    return kept, is_settled


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """For each row of ``weights [N, C]`` (>= 0, any sum) the index on which its ``uniform`` in [0, 1) falls.

    An index of weight 0 is never returned. Of many weights the part is found first, by the parts' sums: on a
    GPU few threads share a row's running sum.
    """
    part = math.gcd(weights.shape[1], _MOST_LIKELY_PART)
    if part < _MOST_LIKELY_PART // 4 or part == weights.shape[1]:
        return _first_above(weights.double().cumsum(-1), uniform)[0]
    parts = weights.reshape(len(weights), -1, part)
    index, left = _first_above(parts.sum(-1, dtype=torch.float64).cumsum(-1), uniform)
    rows = torch.arange(len(weights), device=weights.device)
    cdf = parts[rows, index].double().cumsum(-1)
    within, _ = _first_above(cdf, (left / cdf[:, -1]).clamp_(max=1.0))
    return index * part + within


def _first_above(cdf: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of running sums ``cdf [N, C]`` the first index above the share ``uniform`` of the last one.

    Returns: also how far the share lies above the sum before.
    """
    total = cdf[:, -1:].contiguous()
    # Strictly below the total, so that the index found has a positive weight.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target.contiguous(), right=True).clamp_(max=cdf.shape[1] - 1)
    before = torch.where(index > 0, cdf.gather(1, (index - 1).clamp_(min=0)), 0.0)
    return index[:, 0], (target - before)[:, 0]


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


def _token_logprobs(logprobs: Tensor, token_id: int, state: RequestState) -> TokenLogprobs:
    """The entries of ``logprobs [vocab]`` that the request asked for."""
    num_logprobs = state.sampling.logprobs
    assert num_logprobs is not None
    values, ids = logprobs.topk(num_logprobs)
    possible = values > -math.inf  # a grammar may allow fewer
    top = zip(ids[possible].tolist(), values[possible].tolist(), strict=True)
    return TokenLogprobs(logprob=float(logprobs[token_id]), top=tuple(top))
