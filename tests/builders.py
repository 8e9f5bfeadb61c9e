"""Builders that keep a test case to its point, and an executor that needs no model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile, FitError, ProfileKey
from backfill.execution.executor import ExecutorInfo

_ids = itertools.count()


def make_request(
    prompt_tokens: int = 4,
    max_tokens: int = 8,
    *,
    request_id: str | None = None,
    service_class: ServiceClass = ServiceClass.ONLINE,
    priority: int = 0,
    arrived_at_s: float = 0.0,
    slo: SLO | None = None,
    complete_by_s: float | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    **sampling: object,
) -> Request:
    return Request(
        request_id=RequestId(request_id or f"r{next(_ids)}"),
        prompt_token_ids=list(prompt_token_ids or range(3, 3 + prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
        service_class=service_class,
        priority=priority,
        arrived_at_s=arrived_at_s,
        slo=slo,
        complete_by_s=complete_by_s,
    )


def linear_cost(token_s: float = 0.001, step_s: float = 0.0, context_s: float = 0.0) -> CostModel:
    """Every token costs the same, beside a constant for the step and what is read of the context."""
    knots = (1.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
    return CostModel(
        rows_s=PiecewiseLinear(knots, tuple(step_s + token_s * knot for knot in knots)),
        sampled_s=PiecewiseLinear((0.0, 1.0), (0.0, 0.0)),
        request_s=0.0,
        prefill_pair_s=0.0,
        prefill_context_s=context_s,
        decode_context_s=context_s,
    )


def make_info(
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int | None = None,
    end_token_ids: Sequence[int] = (2,),
    num_host_blocks: int = 0,
) -> ExecutorInfo:
    return ExecutorInfo(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len or num_blocks * block_size,
        vocab_size=1000,
        end_token_ids=tuple(end_token_ids),
        device="none",
        dtype="none",
        num_host_blocks=num_host_blocks,
    )


def flat_cost(step_s: float, row_s: float = 0.0) -> CostModel:
    """Every step takes ``step_s`` seconds, and ``row_s`` for each of its tokens."""
    rows = PiecewiseLinear((0.0, 1.0), (step_s, step_s + row_s))
    return CostModel(rows, PiecewiseLinear((0.0, 1.0), (0.0, 0.0)), 0.0, 0.0, 0.0, 0.0)


class ScriptedExecutor:
    """Checks each plan as a real executor would rely on it, and samples by ``next_token``.

    It keeps what it was told of each request, so a plan that names an unknown request, skips a
    token, or reuses a block of another live request fails here.
    """

    def __init__(self, info: ExecutorInfo, next_token: int = 7) -> None:
        self.info = info
        self.next_token = next_token
        self.plans: list[StepPlan] = []
        self.num_tokens: dict[RequestId, int] = {}
        self.fail_at_step: int | None = None

    def run(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        for request_id in plan.released:
            del self.num_tokens[request_id]
        for admitted in plan.admitted:
            assert admitted.request_id not in self.num_tokens
            self.num_tokens[admitted.request_id] = len(admitted.prompt_token_ids)
        if self.fail_at_step == plan.step:
            raise RuntimeError("scripted failure")
        blocks = [ref >> 1 for piece in plan.slices for ref in piece.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in two requests' tables"
        sampled = []
        for piece in plan.slices:
            end = piece.start + piece.num_tokens
            assert piece.num_tokens > 0
            assert end <= len(piece.blocks) * self.info.block_size
            assert piece.samples == (end == self.num_tokens[piece.request_id])
            if piece.samples:
                self.num_tokens[piece.request_id] += 1
                sampled.append(SampledToken(piece.request_id, self.next_token))
        return StepOutcome(tuple(sampled))


def make_profile(cost: CostModel | None = None, **key: str) -> CostProfile:
    return CostProfile(
        key=ProfileKey(**{"model": "model", "device": "device", "dtype": "dtype", **key}),
        num_layers=32,
        cost=cost or linear_cost(token_s=1e-4, step_s=5e-3, context_s=1e-6),
        error=FitError(0.01, 0.02, 3),
        copies=CopySpeed(1e10, 2e10),
        provenance="made up for tests",
    )
