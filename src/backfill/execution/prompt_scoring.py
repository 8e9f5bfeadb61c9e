"""Log probabilities of prompt tokens, from the rows that a step has computed of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from backfill.core.plan import PromptLogprobs, TokenLogprobs
from backfill.core.request import RequestId
from backfill.execution.layer_pass import MicroBatch
from backfill.execution.sampler import RequestState
from backfill.models.decoder import DecoderModel

_ROWS_AT_ONCE = 64  # bounds memory: a row of logits of a large vocabulary is 0.2 to 1 MB in float32


def score_prompts(
    model: DecoderModel, micro_batches: Sequence[MicroBatch], states: Mapping[RequestId, RequestState]
) -> tuple[PromptLogprobs, ...]:
    """Score each prompt token after a row of these micro-batches, where its request asks for it.

    The micro-batches have passed all layers. A token is scored once, also if the row before it is computed
    again. All ranks of the last stage call this; the first one has the result, the others nothing.
    """
    found: list[PromptLogprobs] = []
    for micro_batch in micro_batches:
        if all(states[each.request_id].sampling.prompt_logprobs is None for each in micro_batch.slices):
            continue
        scored: list[tuple[RequestId, int, int]] = []  # request, first position scored, how many
        rows, targets, num_top = [], [], []
        first_rows = accumulate((each.num_tokens for each in micro_batch.slices), initial=0)
        for scheduled, first_row in zip(micro_batch.slices, first_rows, strict=False):
            state = states[scheduled.request_id]
            positions = state.take_unscored(scheduled.start, scheduled.start + scheduled.num_tokens)
            if positions:
                scored.append((scheduled.request_id, positions.start + 1, len(positions)))
                rows += [first_row + position - scheduled.start for position in positions]
                targets += state.tokens(positions.start + 1, positions.stop + 1).tolist()
                num_top += [state.sampling.prompt_logprobs or 0] * len(positions)
        logprobs = _logprobs_of(model, micro_batch, rows, targets, num_top)
        for request_id, start, count in scored:
            tokens = tuple(each for _, each in zip(range(count), logprobs, strict=False))
            if tokens:
                found.append(PromptLogprobs(request_id, start, tokens))
    return tuple(found)


def _logprobs_of(
    model: DecoderModel, of: MicroBatch, rows: list[int], targets: list[int], num_top: list[int]
) -> Iterator[TokenLogprobs]:
    """Of each row's target; nothing where this rank gets no logits. All of it is computed by the call."""
    groups = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        group = slice(start, start + _ROWS_AT_ONCE)
        index = torch.tensor(rows[group], dtype=torch.int64, device=of.state.residual.device)
        logits = model.logits(of.state, index)
        if logits is not None:
            groups.append(model.kernels.score(logits, targets[group], num_top[group]))
    return (each for group in groups for each in group)
