"""The step that is being planned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backfill.core.request import PriorityLevel, Request, RequestId
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel


class Batch:
    """The requests of the step being planned, with their tokens; its load; what is left of its limits.

    Attributes:
        has_headroom: another request can join.
        has_preempted: a request was preempted for one of this step.
        paused_levels: priority levels whose requests do not join: some of them in flight are to be preempted
            for a waiting request.
        paused_owner: whose online requests do not join either, as it gives way to the waiting request.

    Args:
        cost: predicts steps; None where nothing does.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, cost: CostModel | None = None) -> None:
        self.members: dict[RequestId, tuple[Request, int]] = {}
        self.load = StepLoad()
        self.num_prefill_tokens = 0
        self.num_scored_tokens = 0  # of prompts whose tokens are scored
        self.has_headroom = True
        self.has_preempted = False
        self.paused_levels: Collection[PriorityLevel] = ()
        self.paused_owner: str | None = None
        self.num_tokens_left = max_num_tokens
        self._max_num_seqs = max_num_seqs
        self._cost = cost

    @property
    def num_seqs(self) -> int:
        return len(self.members)

    @property
    def num_seqs_left(self) -> int:
        return self._max_num_seqs - len(self.members)

    @property
    def predicted_s(self) -> float:
        """0 where steps are not predicted."""
        return 0.0 if self._cost is None else self._cost.step_time_s(self.load)

    def is_paused(self, request: Request) -> bool:
        level = request.priority_level
        is_giving_way = level is PriorityLevel.ONLINE and request.owner == self.paused_owner
        return is_giving_way or level in self.paused_levels

    def tokens_of(self, request_id: RequestId) -> int:
        member = self.members.get(request_id)
        return 0 if member is None else member[1]

    def add(self, request: Request, num_tokens: int) -> None:
        self.members[request.request_id] = (request, num_tokens)
        self.num_tokens_left -= num_tokens
        if not request.is_decoding:
            self.num_prefill_tokens += num_tokens
            if request.sampling.prompt_logprobs is not None:
                self.num_scored_tokens += num_tokens
        self.has_headroom = self.num_tokens_left > 0 and len(self.members) < self._max_num_seqs
        self.load.put(request.num_computed_tokens, num_tokens, request.num_logits_rows(num_tokens))

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """``add`` of one token of each request. They decode, and the batch has headroom for all of them."""
        self.members.update([(request.request_id, (request, 1)) for request in requests])
        self.num_tokens_left -= len(requests)
        self.has_headroom = self.num_tokens_left > 0 and len(self.members) < self._max_num_seqs
        self.load.put_decodes([request.num_computed_tokens for request in requests])

    def remove(self, request: Request) -> None:
        """Undo ``add``; nothing if the request is not in the batch."""
        member = self.members.pop(request.request_id, None)
        if member is not None:
            num_tokens = member[1]
            self.num_tokens_left += num_tokens
            self.has_headroom = True
            if not request.is_decoding:
                self.num_prefill_tokens -= num_tokens
                if request.sampling.prompt_logprobs is not None:
                    self.num_scored_tokens -= num_tokens
            self.load.take(request.num_computed_tokens, num_tokens, request.num_logits_rows(num_tokens))
