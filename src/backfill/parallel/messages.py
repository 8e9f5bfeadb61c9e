"""What the ranks report to the driver, and what goes between it and the host of a stage on another node.

To the ranks themselves go plans alone (``plan_codec.py``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import msgspec

from backfill.core.plan import SampledToken, StepOutcome, TokenLogprobs
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo
from backfill.parallel.plan_codec import Sampled


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Once: the rank's part of the model is loaded."""

    info: ExecutorInfo


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """In place of Loaded. The message is for the user."""

    message: str


class StepDone(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """What a rank knows of a step's outcome.

    Attributes:
        token_ids: sampled ones.
        request_ids: whose they are; None for those of all slices of the plan that sample.
        logprobs: theirs; None without any.
        others: the outcome's other fields; None if they have their defaults.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    request_ids: tuple[RequestId, ...] | None = None
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    others: StepOutcome | None = None


class StepRaised(msgspec.Struct, tag=True, frozen=True):
    """The step failed on the rank."""

    step: int
    message: str


FromRank = Loaded | LoadFailed | StepDone | StepRaised


class Started(msgspec.Struct, tag=True, frozen=True):
    """From a host, once: the ranks' processes run. Process ids are those of the node."""

    pids: tuple[int, ...]


class AtBarrier(msgspec.Struct, tag=True, frozen=True):
    """From a host, once: all ranks of the stage have come to the barrier."""


class RankReport(msgspec.Struct, tag=True, frozen=True):
    """From a host: what a rank has reported."""

    rank: int
    report: FromRank


class StageProgress(msgspec.Struct, tag=True, frozen=True):
    """From a host: how far the ranks of the stage are, when that has changed. See ``Progress.part``."""

    part: bytes


FromStage = Started | AtBarrier | RankReport | StageProgress


class RunPlan(msgspec.Struct, tag=True, frozen=True):
    """To a host, for its ranks: a plan as the driver has encoded it."""

    plan: bytes


class StopStep(msgspec.Struct, tag=True, frozen=True):
    step: int


class GoOn(msgspec.Struct, tag=True, frozen=True):
    """To a host: all ranks of the engine have come to the barrier."""


ToStage = RunPlan | StopStep | GoOn


def step_done(step: int, outcome: StepOutcome) -> StepDone:
    """The report of an outcome: tokens by column, and names only where the driver cannot know them."""
    others = None if outcome == StepOutcome(outcome.sampled) else replace(outcome, sampled=())
    if not outcome.sampled:
        return StepDone(step, request_ids=(), others=others)
    request_ids, token_ids, logprobs = zip(*outcome.sampled, strict=True)
    return StepDone(
        step,
        token_ids,
        request_ids if outcome.stopped else None,
        logprobs if any(logprobs) else None,
        others,
    )


def sampled_of(report: StepDone, sampling: tuple[RequestId, ...]) -> Sampled:
    """The tokens of a report. ``sampling``: the requests of all slices of the plan that sample."""
    return Sampled(sampling if report.request_ids is None else report.request_ids, report.token_ids)


def outcome_of(report: StepDone, sampled: Sampled) -> StepOutcome:
    """What ``step_done`` was made of. ``sampled``: ``sampled_of`` the report."""
    logprobs = repeat(None) if report.logprobs is None else report.logprobs
    rows = zip(sampled.request_ids, sampled.token_ids, logprobs, strict=False)
    tokens: tuple[SampledToken, ...] = tuple(map(tuple.__new__, repeat(SampledToken), rows))
    return replace(report.others, sampled=tokens) if report.others is not None else StepOutcome(tokens)
