"""A server's objectives, and the lower bounds on what a request can be promised."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CostProfile
from backfill.scheduling.policy import RequestView

DEFAULT_SLO = SLO(ttft_s=1.0, tpot_s=0.15)
# The prompt by which the default TTFT objective is widened: a chat of a few turns, or a question about a page
# of text. By a prompt of one token, a slow device would promise what no ordinary prompt can have there.
ORDINARY_PROMPT_TOKENS = 512
# A default objective is widened to this multiple of what one request alone needs.
DEFAULT_HEADROOM = 4.0
# The share of the tightest TPOT objective that is left for prompts. Decodes are in every step, so prompts can
# only use what decoding all online requests leaves of the objective. Without a share of their own, one
# request's tight objective would stop the prompts of all others.
PROMPT_SHARE = 1 / 3
# Part of a TTFT objective after which a prompt lets no shorter one pass. The rest is for waits that are not
# predicted: for blocks, for places among the running requests, for more urgent arrivals, for slower steps.
_PASSING_SHARE = 0.5
# Part of the TTFT objective that a step without online decodes may take: who arrives in it can be in time.
_PROMPT_STEP_SHARE = 0.5
# Part of the best rate of prompts from which larger steps of them no longer pay.
PROMPT_EFFICIENCY = 0.9
# When a widened default returns.
_CONFIRMING_FITS = 3
_RETURN_SHARE = 0.8


def lets_pass_until_s(arrived_at_s: float, first_token_by_s: float) -> float:
    """The latest first token of a prompt that has let shorter ones pass (``first_tokens.shortest_first``)."""
    return arrived_at_s + _PASSING_SHARE * (first_token_by_s - arrived_at_s)


def achievable_slo(cost: CostModel, config: SchedulerConfig, num_prompt_tokens: int = 1) -> SLO:
    """The least objectives that a request alone on the device is predicted to meet."""
    return SLO(
        ttft_s=cost.prefill_time_s(num_prompt_tokens, config.max_chunk_tokens),
        tpot_s=_decode_s(cost, num_prompt_tokens),
    )


def impossible_slo(profile: CostProfile, config: SchedulerConfig, num_prompt_tokens: int = 1) -> SLO:
    """No run can meet objectives below these, as far as the profile is certain; 0 where it is not.

    A prompt or a chunk longer than any that the profile was fitted on counts with the longest known length.
    """
    cost, share = profile.cost, profile.certain_share
    known_tokens = max(1, min(num_prompt_tokens, profile.known_tokens))
    known_chunk_tokens = max(1, profile.known_chunk_tokens)
    return SLO(
        ttft_s=share * cost.prefill_time_s(known_tokens, config.max_chunk_tokens, known_chunk_tokens),
        tpot_s=share * _decode_s(cost, known_tokens),
    )


def impossible_objectives(
    asked: Mapping[str, float], profile: CostProfile | None, config: SchedulerConfig, num_prompt_tokens: int
) -> dict[str, float]:
    """The objectives that no run of a request can meet, as far as the profile is certain of it.

    Empty under a policy that does not schedule by objectives: it only measures them. With prefix caching all
    of a prompt but its last token may be cached, so a TTFT is impossible only below the time of a decode.

    Args:
        asked: seconds, by ``ttft`` and ``tpot``.
    Returns: by the same names, the seconds that the request needs even alone, rounded up to milliseconds.
    """
    if profile is None or not config.needs_cost_model:
        return {}
    least = _by_name(achievable_slo(profile.cost, config, num_prompt_tokens))
    impossible = _by_name(impossible_slo(profile, config, num_prompt_tokens))
    if config.prefix_caching:
        least["ttft"], impossible["ttft"] = least["tpot"], impossible["tpot"]
    return {name: rounded_up(least[name]) for name in least if asked.get(name, math.inf) < impossible[name]}


def never_offered(
    asked: Mapping[str, float],
    default: SLO,
    profile: CostProfile | None,
    config: SchedulerConfig,
    prompt_tokens: Sequence[int],
) -> dict[str, tuple[float, float]]:
    """The objectives that no load of a server leaves a request, as far as the profile is certain of it.

    Beside the impossible ones, that is a TPOT objective that leaves prompts no share of a step which decodes
    the request's choices alone. At least the server's own are offered.

    Args:
        asked: seconds, by ``ttft`` and ``tpot``.
        default: the server's own.
        prompt_tokens: of each choice's prompt.
    Returns: by the same names, the seconds that the request needs alone, and the least to ask for, in whole
        milliseconds.
    """
    impossible = impossible_objectives(asked, profile, config, max(prompt_tokens))
    found = {name: (needed_s, needed_s) for name, needed_s in impossible.items()}
    if profile is None or not config.needs_cost_model:
        return found
    known = [min(tokens, profile.known_tokens) for tokens in prompt_tokens]
    known = known[: max(1, profile.known_chunk_tokens)]
    bound_s = least_tpot_slo(profile.certain_share * _decodes_s(profile.cost, config, known))
    if "tpot" in impossible or asked.get("tpot", math.inf) < min(bound_s, default.tpot_s):
        needed_s = rounded_up(_decodes_s(profile.cost, config, prompt_tokens))
        found["tpot"] = needed_s, max(needed_s, min(default.tpot_s, rounded_up(least_tpot_slo(needed_s))))
    return found


def objectives_below_floor(asked: Mapping[str, float], config: SchedulerConfig) -> dict[str, float]:
    """The objectives below the operator's floors.

    Args:
        asked: seconds, by ``ttft`` and ``tpot``.
    Returns: by the same names, the floor in seconds.
    """
    floors_s = _by_name(SLO(config.min_ttft_slo or 0.0, config.min_tpot_slo or 0.0))
    return {name: floor_s for name, floor_s in floors_s.items() if asked.get(name, math.inf) < floor_s}


def least_tpot_slo(decode_s: float) -> float:
    """The least TPOT objective in seconds beside which prompts have their share of a step.

    Args:
        decode_s: of a step that decodes all online requests.
    """
    return decode_s / (1.0 - PROMPT_SHARE)


def decode_limit_s(tpot_s: float) -> float:
    """The most that decoding all online requests may take of a TPOT objective; the rest is for prompts."""
    return (1.0 - PROMPT_SHARE) * tpot_s


@lru_cache(maxsize=16)  # a process has a few models, and a policy asks in every step
def paying_step_s(cost: CostModel, max_step_tokens: int) -> float:
    """Predicted seconds of a step that holds as many tokens of prompts as pay, and nothing else."""
    return cost.efficient_prefill_s(StepLoad(), PROMPT_EFFICIENCY, max_step_tokens)


def prompt_step_s(slo: SLO, paying_s: float) -> float:
    """The most that a step of online prompts may take without decodes, whose gaps would bound it.

    Who arrives in the step waits for it: for no longer than beside decodes, or than pays. Half of the TTFT
    objective is left to be in time.
    """
    return min(_PROMPT_STEP_SHARE * slo.ttft_s, max(slo.tpot_s, paying_s))


def throughput_step_s(
    cost: CostModel, decodes: StepLoad, late_decodes: StepLoad, ttft_s: float, max_step_tokens: int
) -> float:
    """Predicted seconds of a step as large as throughput wants, where nearly all requests are late.

    With decodes that are not late: as many tokens of a prompt as pay beside them, and no more, so that they
    can be in time. Without: all late decodes, or many short prompts, as far as who arrives can wait.

    Args:
        ttft_s: the server's objective, or the part of it that a prediction may use.
    """
    paying_s = cost.efficient_prefill_s(decodes, PROMPT_EFFICIENCY, max_step_tokens)
    if decodes.num_requests:
        return paying_s
    prompts_s = cost.rows_s(cost.efficient_step_sizes(PROMPT_EFFICIENCY, max_step_tokens)[0])
    return max(paying_s, min(_PROMPT_STEP_SHARE * ttft_s, max(cost.step_time_s(late_decodes), prompts_s)))


def server_slo(config: SchedulerConfig, cost: CostModel | None) -> SLO:
    """Objectives of online requests that bring none: the configured ones, else defaults.

    ``cost`` widens defaults that one request of ordinary length alone would barely meet. No default is below
    a floor.
    """
    least = SLO(0.0, 0.0) if cost is None else achievable_slo(cost, config, ORDINARY_PROMPT_TOKENS)
    return slo_above(config, least)


def slo_above(config: SchedulerConfig, least: SLO) -> SLO:
    """The same, with ``least`` that one request alone meets."""
    return SLO(
        ttft_s=_objective(config.ttft_slo, DEFAULT_SLO.ttft_s, least.ttft_s, config.min_ttft_slo),
        tpot_s=_objective(config.tpot_slo, DEFAULT_SLO.tpot_s, least.tpot_s, config.min_tpot_slo),
    )


class ServerObjectives:
    """Objectives of online requests that bring none, while a server runs.

    A default may have been widened because the device was measured while others used it. It returns once
    ``_CONFIRMING_FITS`` models that were fitted to served steps one after another say that at most
    ``_RETURN_SHARE`` of it is needed, to the largest that they say. It is never widened again: an objective
    that grew with the load would be kept by every server.

    Attributes:
        slo: the present ones.
    Args:
        cost: that the engine starts with.
    """

    def __init__(self, config: SchedulerConfig, cost: CostModel | None) -> None:
        self._config = config
        self.slo = config.kept_slo or server_slo(config, cost)
        self._last: deque[SLO] = deque(maxlen=_CONFIRMING_FITS)

    def follow(self, cost: CostModel) -> bool:
        """Take in a model that was fitted to served steps. Returns: whether ``slo`` has changed."""
        self._last.append(server_slo(self._config, cost))
        if len(self._last) < _CONFIRMING_FITS:
            return False
        before = self.slo
        self.slo = SLO(
            _returned(before.ttft_s, max(each.ttft_s for each in self._last)),
            _returned(before.tpot_s, max(each.tpot_s for each in self._last)),
        )
        return self.slo != before


def check_server_slo(config: SchedulerConfig, profile: CostProfile | None) -> list[str]:
    """A warning for each configured objective that one request alone is not predicted to meet.

    Raises: ConfigError for one that cannot be met in any case.
    """
    if profile is None:
        return []
    warnings = []
    least, impossible = (
        _by_name(achievable_slo(profile.cost, config)),
        _by_name(impossible_slo(profile, config)),
    )
    for name, asked_s in {"ttft": config.ttft_slo, "tpot": config.tpot_slo}.items():
        if asked_s is None or asked_s >= least[name]:
            continue
        needs = f"`{name}_slo` {asked_s:g}: one request alone needs {rounded_up(least[name]):g} s"
        if asked_s < impossible[name]:
            raise ConfigError(f"{needs} on this device; give at least that.")
        warnings.append(f"{needs}, by a {profile.quality} cost profile; it may often be missed")
    return warnings


def share_in_time(served: Iterable[RequestView], late: Iterable[RequestView], within_s: float) -> float:
    """Of the online requests that came together, the share that meets its objectives so far.

    Those came together that came no earlier than ``within_s`` before the middle one of those in time. So a
    burst counts whole, and what has been waiting since an earlier time of overload does not.

    Args:
        served: prompts that can be in time, and decodes, which are late if their mean gap is too long.
        late: the others.
    Returns: 0 if all are late.
    """
    banked = [(each.arrived_at_s, each.banked_s >= 0.0) for each in served]
    in_time = sorted(arrived_at_s for arrived_at_s, is_in_time in banked if is_in_time)
    if not in_time:
        return 0.0
    since_s = in_time[len(in_time) // 2] - within_s
    num_in_time = len(in_time) - bisect_left(in_time, since_s)
    num_late = sum(each.arrived_at_s >= since_s for each in late)
    num_late += sum(arrived_at_s >= since_s for arrived_at_s, is_in_time in banked if not is_in_time)
    return num_in_time / (num_in_time + num_late)


def _by_name(slo: SLO) -> dict[str, float]:
    return {"ttft": slo.ttft_s, "tpot": slo.tpot_s}


def _decode_s(cost: CostModel, num_context_tokens: int) -> float:
    return cost.step_time_s(StepLoad.of([(num_context_tokens, 1, True)]))


def _decodes_s(cost: CostModel, config: SchedulerConfig, context_tokens: Sequence[int]) -> float:
    """Of a step that decodes choices with these contexts."""
    load = StepLoad.of_decodes(len(context_tokens), sum(context_tokens), config.max_num_seqs)
    return cost.step_time_s(load)


def rounded_up(seconds: float) -> float:
    """To milliseconds, as seconds are shown that an objective needs."""
    return math.ceil(1000 * seconds) / 1000


def _returned(now_s: float, found_s: float) -> float:
    return found_s if found_s <= _RETURN_SHARE * now_s else now_s


def _objective(asked_s: float | None, default_s: float, least_s: float, floor_s: float | None) -> float:
    return max(default_s, DEFAULT_HEADROOM * least_s, floor_s or 0.0) if asked_s is None else asked_s
