"""Log probabilities of prompts, collected over the steps that compute them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from backfill.core.plan import PromptLogprobs, TokenLogprobs
from backfill.core.request import RequestId


class PromptScores:
    """Of requests in progress, each token's once: it may be computed again, and scored then too."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, list[TokenLogprobs]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, scored: Iterable[PromptLogprobs], known: Collection[RequestId]) -> None:
        """Those of a step. ``known``: requests that have not ended and have lost no earlier chunk."""
        for request_id, start, tokens in scored:
            if request_id in known:
                so_far = self._by_id.setdefault(request_id, [])
                assert start <= len(so_far) + 1, f"{request_id}: from {start} on, up to {len(so_far)}"
                so_far += tokens[len(so_far) + 1 - start :]

    def take(self, request_id: RequestId) -> list[TokenLogprobs] | None:
        """Of all prompt tokens but the first, once they are complete; None if the request asks for none."""
        return self._by_id.pop(request_id, None)
