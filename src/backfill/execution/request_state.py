"""What an executor keeps about a request between steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backfill.core.plan import AdmittedRequest
from backfill.core.sampling import SamplingParams


class RequestState:
    """A request's tokens, prompt first, in a buffer that never moves, and how to sample the next."""

    __slots__ = ("_tokens", "is_plain_greedy", "num_prompt_tokens", "num_tokens", "sampling")

    def __init__(self, admitted: AdmittedRequest) -> None:
        sampling = admitted.sampling
        self.sampling: SamplingParams = sampling
        self.num_prompt_tokens = len(admitted.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self._tokens = np.empty(self.num_prompt_tokens + sampling.max_tokens, dtype=np.int64)
        self._tokens[: self.num_tokens] = admitted.prompt_token_ids
        self.is_plain_greedy = (
            sampling.is_greedy
            and not sampling.has_penalties
            and not sampling.logit_bias
            and sampling.min_tokens == 0
            and sampling.num_logprobs is None
        )

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """A view of the tokens at positions ``[start, end)``."""
        assert end <= self.num_tokens, f"tokens up to {end} asked for, {self.num_tokens} known"
        return self._tokens[start:end]

    def append(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
