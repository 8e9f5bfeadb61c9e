"""Requests that share prefixes, are preempted and restored: their tokens are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Collection
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch

from backfill.core.clock import VirtualClock
from backfill.core.config import (
    CheckpointingName,
    PolicyName,
    RestoreMode,
    SchedulerConfig,
)
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import FinishReason, Request, ServiceClass
from backfill.engine.engine import Engine
from backfill.execution.copies import BlockCopier
from backfill.execution.create import create_torch_executor
from backfill.execution.executor import Executor
from backfill.execution.pool_pair import CompletedCopies
from backfill.execution.torch_executor import TorchExecutor
from tests.builders import make_profile, make_request
from tests.execution.tiny import model_fixture, tiny_config
from tests.integrity import check_scheduler

ENOUGH, TOO_FEW, NEARLY_ALL_SHARED, HOST = 200, 22, 20, 64
OFFLINE_SHAPES = [(40, 60), (31, 50), (52, 70), (20, 60)]
ONLINE_SHAPES = [(60, 30), (50, 30), (40, 20)]
STEPS_BETWEEN_ARRIVALS = 25
NUM_SHARED = 28  # leading tokens of all prompts, at most half of each


model_dir = model_fixture("llama")


def create_executor(
    model_dir: Path, num_blocks: int, scheduler: SchedulerConfig, **changes: Any
) -> TorchExecutor:
    """Beside a host pool of ``HOST`` blocks."""
    return create_torch_executor(tiny_config(model_dir, num_blocks, HOST, scheduler=scheduler, **changes))


def requests(service_class: ServiceClass, shapes: list[tuple[int, int]]) -> list[Request]:
    generator = torch.Generator().manual_seed(len(service_class.value))
    shared = torch.randint(3, 90, (NUM_SHARED,), generator=torch.Generator().manual_seed(0)).tolist()

    def prompt(length: int) -> list[int]:
        first = shared[: length // 2]
        return first + torch.randint(3, 90, (length - len(first),), generator=generator).tolist()

    return [
        make_request(
            prompt_token_ids=prompt(length),
            max_tokens=max_tokens,
            request_id=f"{service_class.value}-{index}",
            service_class=service_class,
            ignore_eos=True,
        )
        for index, (length, max_tokens) in enumerate(shapes)
    ]


def serve(
    executor: TorchExecutor, config: SchedulerConfig, *, stops_every: int = 0
) -> tuple[Engine, list[list[int]], int]:
    """Offline requests fill the device; online ones take their memory away, one after another.

    Args:
        stops_every: the offline part of every so-manieth step is stopped where it can be; 0 never.
    Returns: the engine, all outputs, and the number of steps that were stopped.
    """
    engine = Engine(config, executor, VirtualClock(), make_profile())
    served, num_stopped = serve_on(engine, executor, stops_every)
    return engine, [request.output_token_ids for request in served], num_stopped


def wait_for_a_copy(executor: TorchExecutor | Clumsy) -> None:
    """Until one has ended, if any has begun: when requests go on depends on it, and not on the machine."""
    for each in getattr(executor, "ranks", [executor]):
        if each._copier is not None:
            each._copier.wait(60.0)


def serve_on(
    engine: Engine, executor: TorchExecutor | Clumsy, stops_every: int = 0
) -> tuple[list[Request], int]:
    """As ``serve``; the requests, and the number of steps that were stopped."""
    offline = requests(ServiceClass.OFFLINE, OFFLINE_SHAPES)
    online = requests(ServiceClass.ONLINE, ONLINE_SHAPES)
    for request in offline:
        engine.add(request)
    num_steps = num_stopped = 0
    while engine.has_unfinished or num_steps < STEPS_BETWEEN_ARRIVALS * len(online):
        number, since = divmod(num_steps, STEPS_BETWEEN_ARRIVALS)
        if since == 10 and number < len(online):
            engine.add(online[number])
        if stops_every and num_steps % stops_every == 0:
            executor.request_stop(num_steps)  # plans are numbered from 0, one a step
        engine.step()
        num_stopped += engine.stats().step.stopped
        check_scheduler(engine.scheduler)
        num_steps += 1
    return [*offline, *online], num_stopped


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path) -> list[list[int]]:
    config = SchedulerConfig(prefix_caching=False)
    engine, tokens, _ = serve(create_executor(model_dir, ENOUGH, config), config)
    assert engine.scheduler.counters[ServiceClass.OFFLINE].num_preemptions == 0
    assert num_hit_tokens(engine) == 0
    return tokens


def num_hit_tokens(engine: Engine) -> int:
    counters = engine.scheduler.counters.values()
    return sum(each.num_prefix_hit_tokens + each.num_host_prefix_hit_tokens for each in counters)


@pytest.mark.parametrize(  # each two values together
    ("checkpointing", "restore", "prefix_caching", "num_micro_batches"),
    [
        ("adaptive", "background", True, 2),
        ("eager", "blocking", False, 2),
        ("swap", "background", False, 1),
        pytest.param("adaptive", "blocking", False, 1, marks=pytest.mark.slow),
        pytest.param("eager", "background", True, 1, marks=pytest.mark.slow),
        pytest.param("swap", "blocking", True, 2, marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_continue_with_the_same_tokens(
    model_dir: Path,
    undisturbed: list[list[int]],
    checkpointing: CheckpointingName,
    restore: RestoreMode,
    prefix_caching: bool,
    num_micro_batches: int,
) -> None:
    config = SchedulerConfig(checkpointing=checkpointing, kv_restore=restore, prefix_caching=prefix_caching)
    executor = create_executor(model_dir, TOO_FEW, config, num_micro_batches=num_micro_batches)
    engine, tokens, _ = serve(executor, config)
    counters = engine.scheduler.counters[ServiceClass.OFFLINE]
    assert tokens == undisturbed
    assert (num_hit_tokens(engine) > 0) == prefix_caching
    assert counters.num_preemptions > 0
    assert counters.num_recomputed_tokens < 8 * len(OFFLINE_SHAPES)  # a block each; 200 without copies


@pytest.mark.parametrize(
    "checkpointing", ["eager", *(pytest.param(each, marks=pytest.mark.slow) for each in ("swap", "none"))]
)
def test_kv_of_8_bits_gives_the_same_tokens_restored_recomputed_and_in_shared_blocks(
    model_dir: Path, undisturbed: list[list[int]], checkpointing: CheckpointingName
) -> None:
    config = SchedulerConfig(checkpointing=checkpointing, kv_layout="bidirectional")
    outputs = {}
    for num_blocks in (ENOUGH, TOO_FEW):
        executor = create_executor(model_dir, num_blocks, config, kv_dtype="int8")
        assert executor.info.num_blocks == num_blocks
        engine, outputs[num_blocks], _ = serve(executor, config)
        counters = engine.scheduler.counters[ServiceClass.OFFLINE]
        assert (counters.num_preemptions > 0) == (num_blocks == TOO_FEW)
    assert (counters.num_restored_tokens > 0) == (checkpointing != "none")
    assert outputs[TOO_FEW] == outputs[ENOUGH]
    assert outputs[ENOUGH] != undisturbed, "KV is rounded"


@pytest.mark.parametrize(
    ("stops_every", "prefix_caching", "num_micro_batches"),
    [
        (2, True, 2),
        pytest.param(1, True, 1, marks=pytest.mark.slow),
        pytest.param(2, False, 1, marks=pytest.mark.slow),
        pytest.param(3, False, 2, marks=pytest.mark.slow),
    ],
)
def test_suspended_steps_beside_reclaimed_and_restored_blocks(
    model_dir: Path,
    undisturbed: list[list[int]],
    stops_every: int,
    prefix_caching: bool,
    num_micro_batches: int,
) -> None:
    config = SchedulerConfig(policy="slo", checkpointing="adaptive", prefix_caching=prefix_caching)
    executor = create_executor(model_dir, TOO_FEW, config, num_micro_batches=num_micro_batches)
    engine, tokens, num_stopped = serve(executor, config, stops_every=stops_every)
    counters = engine.scheduler.counters[ServiceClass.OFFLINE]
    assert tokens == undisturbed
    assert (num_hit_tokens(engine) > 0) == prefix_caching
    assert counters.num_preemptions > 0
    assert counters.num_restored_tokens > 0
    assert num_stopped > 1


class Clumsy(Executor):
    """An executor that fails: alternately before the step begins and within a layer.

    Args:
        fails_at: from each of these steps on, the first step with a new request. When that one is admitted
            depends on the copies.
    """

    def __init__(self, executor: TorchExecutor, fails_at: Collection[int]) -> None:
        self.info = executor.info
        self._executor = executor
        self._copier = executor._copier
        self._to_come = sorted(fails_at)
        self._known = set[str]()
        self._num_failures = 0

    def run(self, plan: StepPlan) -> StepOutcome:
        has_new = any(admitted.request_id not in self._known for admitted in plan.admitted)
        self._known.update(admitted.request_id for admitted in plan.admitted)
        if not (has_new and self._to_come and plan.step >= self._to_come[0]):
            return self._executor.run(plan)
        del self._to_come[0]
        self._num_failures += 1
        name = "RequestState" if self._num_failures % 2 else "build_batch"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"backfill.execution.torch_executor.{name}", self._fail)
            return self._executor.run(plan)

    def request_stop(self, step: int) -> None:
        self._executor.request_stop(step)

    @staticmethod
    def _fail(*arguments: object) -> None:
        raise MemoryError("scripted")


@pytest.mark.parametrize(  # each two values together
    ("policy", "fails_at", "prefix_caching", "num_micro_batches"),
    [
        ("slo", {0}, True, 2),
        ("priority", {60}, True, 1),
        ("slo", {0, 10, 60}, True, 1),
        pytest.param("priority", {0}, False, 1, marks=pytest.mark.slow),
        pytest.param("slo", {60}, False, 2, marks=pytest.mark.slow),
        pytest.param("priority", {0, 10, 60}, False, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_run_again_after_failed_steps_give_the_same_tokens(
    model_dir: Path,
    undisturbed: list[list[int]],
    policy: PolicyName,
    fails_at: set[int],
    prefix_caching: bool,
    num_micro_batches: int,
) -> None:
    config = SchedulerConfig(policy=policy, checkpointing="adaptive", prefix_caching=prefix_caching)
    executor = Clumsy(
        create_executor(model_dir, TOO_FEW, config, num_micro_batches=num_micro_batches), fails_at
    )
    engine = Engine(config, executor, VirtualClock(), make_profile())
    served, _ = serve_on(engine, executor)
    for request, tokens in zip(served, undisturbed, strict=True):
        assert request.output_token_ids == tokens[: len(request.output_token_ids)]
        is_lost = request.finish_reason is FinishReason.ERROR
        assert (len(request.output_token_ids) < len(tokens)) == is_lost
    lost = [request.request_id for request in served if request.finish_reason is FinishReason.ERROR]
    assert bool(lost) == (fails_at != {0})
    assert any(request.was_retried and request.request_id not in lost for request in served)
    engine.step()
    assert engine.scheduler.kv.counts.referenced == 0


SHARED_OFFLINE_SHAPES = [(8, 40), (9, 30), (12, 35), (5, 40), (11, 25), (7, 40), (4, 45), (10, 30)]
SHARED_ONLINE_SHAPES = [(7, 20), (9, 15), (12, 25), (4, 20), (10, 15), (6, 30), (5, 25), (3, 20)]


def report_in_next_step(copier: BlockCopier) -> None:
    """Its copies are reported one step after they began: what is shared and copied depends on no thread."""
    take_completed, held = copier.take_completed, CompletedCopies()

    def take_held() -> CompletedCopies:
        nonlocal held
        futures.wait([future for _, future in copier._in_flight], 60.0)
        taken, held = held, take_completed()
        return taken

    copier.take_completed = take_held  # type: ignore[method-assign]


def crowd_on(engine: Engine, executor: TorchExecutor, stops_every: int = 0) -> list[Request]:
    """Serve many short requests of both classes, whose last blocks are much of the pool."""
    if executor._copier is not None:
        report_in_next_step(executor._copier)
    offline = requests(ServiceClass.OFFLINE, SHARED_OFFLINE_SHAPES)
    online = requests(ServiceClass.ONLINE, SHARED_ONLINE_SHAPES)
    for request in offline:
        engine.add(request)
    num_steps = 0
    while engine.has_unfinished or num_steps < 8 * len(online):
        number, since = divmod(num_steps, 8)
        if since == 5 and number < len(online):
            engine.add(online[number])
        if stops_every and num_steps % stops_every == 0:
            executor.request_stop(num_steps)
        engine.step()
        wait_for_a_copy(executor)
        check_scheduler(engine.scheduler)
        num_steps += 1
    return [*offline, *online]


@pytest.fixture(scope="module")
def undisturbed_crowd(model_dir: Path) -> list[list[int]]:
    config = SchedulerConfig(prefix_caching=False)
    executor = create_executor(model_dir, ENOUGH, config)
    engine = Engine(config, executor, VirtualClock(), make_profile())
    return [request.output_token_ids for request in crowd_on(engine, executor)]


@pytest.mark.parametrize(
    ("checkpointing", "restore", "policy", "prefix_caching"),
    [
        ("adaptive", "background", "slo", True),
        ("eager", "blocking", "bros", True),
        ("none", "background", "priority", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("swap", "background", "priority", True),
                ("adaptive", "background", "bros", False),
                ("eager", "blocking", "slo", False),
                ("swap", "background", "slo", False),
                ("none", "background", "priority", False),
            )
        ),
    ],
)
def test_requests_that_share_blocks_give_the_same_tokens(
    model_dir: Path,
    undisturbed_crowd: list[list[int]],
    checkpointing: CheckpointingName,
    restore: RestoreMode,
    policy: PolicyName,
    prefix_caching: bool,
) -> None:
    config = SchedulerConfig(
        checkpointing=checkpointing,
        kv_restore=restore,
        prefix_caching=prefix_caching,
        policy=policy,
        kv_layout="bidirectional",
    )
    executor = create_executor(model_dir, NEARLY_ALL_SHARED, config)
    engine = Engine(config, executor, VirtualClock(), make_profile())
    served = crowd_on(engine, executor, stops_every=3 if policy == "slo" else 0)
    assert [request.output_token_ids for request in served] == undisturbed_crowd
    sharing = engine.scheduler.kv.sharing
    assert sharing.num_entered > 0
    assert sharing.num_overwritten > 0
    assert bool(engine.scheduler.kv.checkpointer.num_copied_slots) == (checkpointing != "none")
