"""A token for each row of logits: what it means, in plain torch, for any device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_LIKELY_PART = 512
_NUM_CANDIDATES = 1024  # top-p and min-p rarely keep more; rows that do are sorted whole
_MAX_ROWS_DRAWN = 32  # in one call: bounds the memory of a draw, which copies its rows


class RowSampling(NamedTuple):
    """How the token of each of N rows is drawn. Arrays ``[N]``.

    A row is drawn from softmax(logits / temperature): of the ``top_k`` most likely tokens, of these the
    fewest whose mass reaches ``top_p`` of theirs, and of these the ones at least ``min_p`` times as likely as
    the most likely.
    """

    temperature: NDArray[np.float32]  # 0: the most likely token
    top_k: NDArray[np.int64]  # 0: all
    top_p: NDArray[np.float64]  # 1: all
    min_p: NDArray[np.float32]  # 0: all
    uniform: NDArray[np.float64]  # in [0, 1): where in the distribution the token is taken

    def check(self, num_rows: int) -> None:
        """Raises: ValueError for an array of another length or type."""
        arrays: tuple[NDArray[Any], ...] = tuple(self)
        types = np.float32, np.int64, np.float64, np.float32, np.float64
        for name, each, wanted in zip(self._fields, arrays, types, strict=True):
            if each.shape != (num_rows,) or each.dtype != wanted or not each.flags.c_contiguous:
                expected = f"contiguous {wanted.__name__} [{num_rows}]"
                raise ValueError(f"{name}: expected {expected}, got {each.dtype} {list(each.shape)}")


def sample_rows(logits: Tensor, how: RowSampling) -> list[int]:
    """See ``Kernels.sample``."""
    token_ids = _most_likely(logits)
    drawn = np.flatnonzero(how.temperature > 0.0)
    for start in range(0, len(drawn), _MAX_ROWS_DRAWN):
        rows = drawn[start : start + _MAX_ROWS_DRAWN]
        for row, token_id in zip(rows.tolist(), _draw(logits, how, rows).tolist(), strict=True):
            token_ids[row] = token_id
    return token_ids


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


def _draw(logits: Tensor, how: RowSampling, rows: NDArray[np.int64]) -> Tensor:
    """One token for each of ``rows``."""
    temperature, top_k, top_p, min_p, uniform = (
        torch.from_numpy(each[rows]).to(logits.device) for each in how
    )
    probs = (logits[torch.from_numpy(rows).to(logits.device)] / temperature[:, None]).softmax(-1)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    vocab_size = probs.shape[1]
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    has_top_k = (how.top_k > 0) & (how.top_k < vocab_size)
    is_filtered = (has_top_k | (how.top_p < 1.0) | (how.min_p > 0.0))[rows]
    whole, filtered = np.flatnonzero(~is_filtered).tolist(), np.flatnonzero(is_filtered).tolist()
    if whole:
        token_ids[whole] = _invert_cdf(probs[whole], uniform[whole])
    if filtered:
        token_ids[filtered] = _draw_filtered(
            probs[filtered],
            uniform[filtered],
            top_k=top_k[filtered],
            top_p=top_p[filtered],
            min_p=min_p[filtered],
        )
    return token_ids


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
    kept = in_top_k & (before < (top_p * mass)[:, None]) & (ranked >= min_p[:, None] * ranked[:, :1])
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
