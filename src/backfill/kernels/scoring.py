"""Log probabilities of tokens: what they mean, in plain torch, for any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from backfill.core.plan import TokenLogprobs


def score_rows(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """See ``Kernels.score``."""
    logits = logits.float()
    log_sums = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logits > own).sum(-1) + 1
    top: list[tuple[tuple[int, float], ...]] = [()] * len(logits)
    for count in set(num_top) - {0}:  # which of equals are named depends on the count
        rows = [row for row, each in enumerate(num_top) if each == count]
        best = (logits if len(rows) == len(logits) else logits[rows]).topk(min(count, logits.shape[1]))
        logprobs = best.values - log_sums[rows]
        for row, ids, values in zip(rows, best.indices.tolist(), logprobs.tolist(), strict=True):
            top[row] = tuple(pair for pair in zip(ids, values, strict=True) if pair[1] > -math.inf)
    columns = (own - log_sums)[:, 0].tolist(), ranks.tolist(), top
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]
