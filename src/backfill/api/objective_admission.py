"""Refuses online requests for whose objectives the load leaves no headroom.

Objectives are admitted as memory is. An objective tighter than the server's own binds every step: to keep a
tight TPOT objective the scheduler would stop all offline work and slow all prompts. With ``--shed-hopeless``
requests that would miss their TTFT objective by far are refused too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from backfill.api.online_load import OnlineLoad
from backfill.api.predictions import Passing, Prediction
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.http.errors import MAX_RETRY_AFTER_S, RateLimited
from backfill.protocol.request_headers import Objective
from backfill.scheduling.objectives import decode_limit_s, least_tpot_slo, rounded_up

# What the prompts ahead will find in the cache is not known, so the true wait may be half of the prediction.
SHED_FACTOR = 2.0


class RequestShed(RateLimited):
    """The request would miss its objective by far."""

    def __init__(self, predicted_s: float, objective_s: float, retry_after_s: int) -> None:
        super().__init__(
            f"The first token would come after about {predicted_s:.1f} s, and the objective is "
            f"{objective_s:g} s. Please retry in {retry_after_s} s.",
            "slow_down",
            retry_after_s,
            ServiceClass.ONLINE,
            "hopeless",
        )


class ObjectiveUnavailable(RateLimited):
    """The load leaves no headroom for a request's objective.

    Args:
        objective: as the client named it.
        offered_s: what the present load leaves.
        leaves: what leaves it.
    """

    def __init__(
        self,
        objective: Objective,
        offered_s: float,
        retry_after_s: int,
        *,
        leaves: str = "the present load leaves",
    ) -> None:
        super().__init__(
            f"{objective.name}: asked {objective.show(objective.seconds)}, "
            f"{leaves} {objective.show(rounded_up(round(offered_s, 9)))}. "
            f"Please ask for that, or retry in {retry_after_s} s.",
            "objective_unavailable",
            retry_after_s,
            ServiceClass.ONLINE,
            "objective_unavailable",
            param=objective.name,
        )


def check_hopeless(predicted: Prediction, objective_s: float, passing: Callable[[], Passing]) -> None:
    """Raise RequestShed if a request would miss its TTFT objective by far because of those ahead of it.

    The time that it takes without others is no reason to shed: a retry would not change it.

    Args:
        passing: as of ``check_objectives``.
    """
    most_s = SHED_FACTOR * max(objective_s, predicted.ttft_alone_s)
    if predicted.ttft_s > most_s and (ttft_s := min(predicted.ttft_s, passing().ttft_s)) > most_s:
        raise RequestShed(ttft_s, objective_s, retry_after_s(ttft_s - predicted.ttft_alone_s))


def retry_after_s(wait_s: float) -> int:
    """Whole seconds, 1 to 120.

    Args:
        wait_s: until all prompts ahead are computed. Where one long prompt is ahead no less would do.
    """
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))


def check_objectives(
    objectives: Mapping[str, Objective],
    default: SLO,
    load: OnlineLoad,
    predicted: Prediction,
    passing: Callable[[], Passing],
    prompt_tokens: Sequence[int],
    end_s: Callable[[int], int],
) -> None:
    """Check that the load leaves headroom for objectives tighter than the default.

    Never a lasting refusal: predictions follow the measured times, so even what a request needs alone may
    soon be less. What no load leaves is refused before, as far as that is certain (``never_offered``).

    Args:
        objectives: of the request, by field of ``slo``.
        default: the server's objectives. They are always offered.
        predicted: of this request beside ``load``.
        passing: what is predicted if it passes longer prompts (``OnlineLoad.passing``).
        prompt_tokens: of each choice's prompt.
        end_s: whole seconds until so many choices have ended, as far as is known.
    Raises: ObjectiveUnavailable.
    """
    # What it takes alone is no reason to refuse: no retry would change that.
    ttft, tpot = objectives.get("ttft"), objectives.get("tpot")
    if (
        ttft is not None
        and ttft.seconds < default.ttft_s
        and predicted.ttft_s > max(ttft.seconds, predicted.ttft_alone_s)
    ):
        ttft_s, wait_s = min((predicted.ttft_s, predicted.ttft_s - predicted.ttft_alone_s), passing())
        if (offered_s := min(default.ttft_s, ttft_s)) > ttft.seconds:
            raise ObjectiveUnavailable(ttft, offered_s, retry_after_s(wait_s))
    if tpot is not None and tpot.seconds < default.tpot_s:
        _check_tpot(tpot, default.tpot_s, load, predicted, prompt_tokens, end_s)


def _check_tpot(
    tpot: Objective,
    default_s: float,
    load: OnlineLoad,
    predicted: Prediction,
    prompt_tokens: Sequence[int],
    end_s: Callable[[int], int],
) -> None:
    if tpot.seconds < load.bus_least_step_s:
        raise ObjectiveUnavailable(
            tpot,
            min(default_s, load.bus_least_step_s),
            MAX_RETRY_AFTER_S,
            leaves="with any offloading interval that fits the device, its bus leaves, beside other engines,",
        )
    limit_s = decode_limit_s(tpot.seconds)
    if predicted.decode_s <= limit_s:
        return
    offered_s = min(default_s, least_tpot_slo(predicted.decode_s))
    if predicted.decode_alone_s > limit_s:  # the end of others alone does not help
        slow = "too low even without load; the server's present speed leaves"
        raise ObjectiveUnavailable(tpot, offered_s, MAX_RETRY_AFTER_S, leaves=slow)
    raise ObjectiveUnavailable(tpot, offered_s, end_s(load.num_too_many(prompt_tokens, limit_s)))
