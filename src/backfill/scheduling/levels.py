"""When requests change their priority level: promotion and relegation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backfill.core.request import PriorityLevel, Request
from backfill.scheduling.prediction import StepPredictor

# Part of its completion window that a request may spend promoted.
_MAX_PROMOTED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LevelRule:
    """Promotes offline requests near the end of their window; relegates online ones that come too late.

    An online request is relegated when it cannot meet its TTFT objective any more, even alone on the device:
    it is served with what the others leave, and is left out of the rule that bounds steps (the idea of
    arXiv 2503.22562). It stays relegated.

    Attributes:
        promote_before_s: an offline request is promoted this long before its completion window ends, or
            after half of the window if that is later; 0 is never.
        relegates: online requests are relegated.
        predictor: predicts how long a prompt takes; None relegates a request when its deadline has passed.
        chunk_tokens: of one prompt in a step, at most.
    """

    promote_before_s: float
    relegates: bool
    predictor: StepPredictor | None
    chunk_tokens: int

    def changes_at_s(self, request: Request) -> float:
        """When the request moves to its next level if it makes no progress until then; inf for never."""
        match request.priority_level:
            case PriorityLevel.OFFLINE:
                if request.complete_by_s is None or self.promote_before_s == 0.0:
                    return math.inf
                window_s = request.complete_by_s - request.arrived_at_s
                return request.complete_by_s - min(self.promote_before_s, _MAX_PROMOTED_SHARE * window_s)
            case PriorityLevel.ONLINE if self.relegates and request.last_token_at_s is None:
                return request.next_token_by_s - self._prefill_s(request)
            case _:
                return math.inf

    def next_level(self, request: Request) -> PriorityLevel:
        is_online = request.priority_level is PriorityLevel.ONLINE
        return PriorityLevel.RELEGATED if is_online else PriorityLevel.PROMOTED

    def _prefill_s(self, request: Request) -> float:
        """Predicted seconds to the first token of what is left of the prompt, alone on the device."""
        predictor = self.predictor
        if predictor is None:
            return 0.0
        seconds = predictor.cost.prefill_time_s(request.num_pending_tokens, self.chunk_tokens)
        return predictor.time_scale * seconds
