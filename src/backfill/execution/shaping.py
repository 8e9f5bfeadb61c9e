"""What requests' sampling parameters do to logits before a token is drawn, for all rows of a batch at once.

Each function changes ``logits [N, vocab]`` (float32) in place, with one ``RequestState`` a row. What becomes
of a row depends on its own request alone. Where no request asks for it, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from backfill.execution.sampler import RequestState


def add_biases(logits: Tensor, states: Sequence[RequestState]) -> None:
    """``logit_bias``."""
    biased = {row: state.sampling.logit_bias for row, state in enumerate(states) if state.sampling.logit_bias}
    if not biased:
        return
    at = _entries({row: list(biases) for row, biases in biased.items()}, logits.device)
    values = [value for biases in biased.values() for value in biases.values()]
    logits[at] += torch.tensor(values, device=logits.device)


def penalise(logits: Tensor, states: Sequence[RequestState]) -> None:
    """``repetition_penalty`` for tokens of prompt and output, then the other two for tokens of the output."""
    repeated = {
        row: state.tokens(0, state.num_tokens)
        for row, state in enumerate(states)
        if state.sampling.repetition_penalty != 1.0
    }
    if repeated:
        at = _entries(repeated, logits.device)
        values = logits[at]
        penalty = _of_rows([state.sampling.repetition_penalty for state in states], at[0])
        # A token that occurs twice is written twice, with the same value.
        logits[at] = torch.where(values > 0, values / penalty, values * penalty)
    counted = {
        row: state.tokens(state.num_prompt_tokens, state.num_tokens)
        for row, state in enumerate(states)
        if state.sampling.presence_penalty or state.sampling.frequency_penalty
    }
    if counted:
        vocab_size = logits.shape[1]
        keys, counts = np.unique(
            np.concatenate([row * vocab_size + tokens for row, tokens in counted.items()]), return_counts=True
        )
        rows, ids = (torch.from_numpy(each).to(logits.device) for each in divmod(keys, vocab_size))
        frequency = _of_rows([state.sampling.frequency_penalty for state in states], rows)
        presence = _of_rows([state.sampling.presence_penalty for state in states], rows)
        logits[rows, ids] -= torch.from_numpy(counts).to(logits.device) * frequency + presence


def exclude(logits: Tensor, states: Sequence[RequestState], end_token_ids: Sequence[int]) -> None:
    """Make tokens impossible: all but ``allowed_token_ids``, the ends of ``bad_words``, and end tokens before
    ``min_tokens``. A row of which nothing is left gets its first end token.
    """
    allowed = {
        row: state.allowed_token_ids
        for row, state in enumerate(states)
        if state.allowed_token_ids is not None
    }
    if allowed:
        at = _entries(allowed, logits.device)
        values = logits[at]
        logits[list(allowed)] = float("-inf")
        logits[at] = values
    excluded = {row: _excluded(state, end_token_ids) for row, state in enumerate(states)}
    excluded = {row: token_ids for row, token_ids in excluded.items() if token_ids}
    if excluded:
        logits[_entries(excluded, logits.device)] = float("-inf")
    rows = torch.tensor(sorted(allowed.keys() | excluded.keys()), dtype=torch.int64, device=logits.device)
    if len(rows):
        empty = rows[logits[rows].amax(-1) == float("-inf")]
        logits[empty, end_token_ids[0] if end_token_ids else 0] = 0.0


def _excluded(state: RequestState, end_token_ids: Sequence[int]) -> list[int]:
    sampling = state.sampling
    excluded: list[int] = []
    if state.num_output_tokens < sampling.min_tokens:
        excluded = [*end_token_ids, *(sampling.stop_token_ids or ())]
    for *before, last in sampling.bad_words_token_ids or ():
        start = state.num_tokens - len(before)
        if start >= state.num_prompt_tokens and state.tokens(start, state.num_tokens).tolist() == before:
            excluded.append(last)
    return excluded


def _entries(
    token_ids: Mapping[int, Sequence[int] | NDArray[np.int64]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Indices of the logits of these tokens, by row."""
    lens = [len(each) for each in token_ids.values()]
    rows = np.repeat(np.array(list(token_ids), dtype=np.int64), lens)
    ids = np.concatenate([np.asarray(each, dtype=np.int64) for each in token_ids.values()])
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def _of_rows(values: list[float], rows: Tensor) -> Tensor:
    """A row's value, for each of ``rows``."""
    return torch.tensor(values, device=rows.device)[rows]
