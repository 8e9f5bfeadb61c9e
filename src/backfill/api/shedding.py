"""Load shedding (``--shed-hopeless``): refuses requests that would miss their TTFT objective by far."""

from __future__ import annotations

import math

from backfill.api.admission import MAX_RETRY_AFTER_S
from backfill.api.online_load import Prediction

# A prompt that is partly computed counts in full, so the true wait may be half of the prediction.
SHED_FACTOR = 2.0


class RequestShed(Exception):
    """The request would miss its objective by far; the client may retry after ``retry_after_s`` seconds."""

    code = "slow_down"

    def __init__(self, predicted_s: float, objective_s: float, retry_after_s: int) -> None:
        super().__init__(
            f"The first token would come after about {predicted_s:.1f} s, and the objective is "
            f"{objective_s:g} s. Please retry in {retry_after_s} s."
        )
        self.retry_after_s = retry_after_s


def check_hopeless(predicted: Prediction, objective_s: float) -> None:
    """Raise RequestShed if a request would miss its TTFT objective by far because of those ahead of it."""
    if should_shed(predicted.ttft_s, predicted.ttft_alone_s, objective_s):
        raise RequestShed(predicted.ttft_s, objective_s, retry_after_s(predicted, objective_s))


def should_shed(predicted_s: float, alone_s: float, objective_s: float) -> bool:
    """Whether a request would miss its TTFT objective by far because of the requests ahead of it.

    ``alone_s``, the time that it takes without others, is no reason to shed: a retry would not change it.
    """
    return predicted_s > SHED_FACTOR * max(objective_s, alone_s)


def retry_after_s(predicted: Prediction, objective_s: float) -> int:
    """Whole seconds until so many prompts are computed that the objective can be met, 1 to 120."""
    wait_s = math.ceil(predicted.ttft_s - max(objective_s, predicted.ttft_alone_s))
    return min(MAX_RETRY_AFTER_S, max(1, wait_s))
