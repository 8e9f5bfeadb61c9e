"""Requests, and executors that stop between two layers or have little memory, for tests of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import StepPlan
from backfill.core.request import Request, ServiceClass
from backfill.engine.engine import Engine
from backfill.execution.executor import Executor, StepOutcome
from backfill.kernels.stop_signal import StopSignal
from tests.builders import linear_cost, make_profile, make_request
from tests.integrity import check_scheduler
from tests.shared import examples

OFFLINE_SHAPES = [(21, 9), (5, 12), (30, 6), (11, 10)]
ONLINE_SHAPES = [(13, 5), (4, 7), (9, 4)]


class WithBlocks(Executor):
    """The same executor, of whose pool the control plane may use ``num_blocks``."""

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        self.info = replace(executor.info, num_blocks=num_blocks)
        self._executor = executor

    def run(self, plan: StepPlan) -> StepOutcome:
        return self._executor.run(plan)

    def request_stop(self, step: int) -> None:
        self._executor.request_stop(step)


class Interruptions:
    """Wraps a model, with a callback before each layer and before the logits.

    Attributes:
        num_split_steps: steps that began with two micro-batches.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_layers: int = model.num_layers
        self.shard = model.shard
        self.kernels = model.kernels
        self.heeds_stops: bool = model.heeds_stops
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.num_split_steps = 0
        self._has_embedded = False

    def embed(self, *arguments: Any) -> Any:
        self.num_split_steps += self._has_embedded
        self._has_embedded = True
        return self._model.embed(*arguments)

    def run_layers(
        self, layers: range, state: Any, pool: Any, batch: Any, stop: StopSignal | None = None
    ) -> tuple[Any, int]:
        self._has_embedded = False
        for done, index in enumerate(layers):
            if stop is not None and done and done % stop.layers_apart == 0 and stop.is_set():
                return state, done
            self.before_layer(index)
            state, _ = self._model.run_layers(range(index, index + 1), state, pool, batch)
        return state, len(layers)

    def logits(self, *arguments: Any) -> Any:
        self.before_layer(self.num_layers)
        return self._model.logits(*arguments)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = prompt(16, seed=0)  # two blocks


def requests(service_class: ServiceClass, shapes: Sequence[tuple[int, int]]) -> list[Request]:
    """One for each (prompt tokens behind ``SHARED``, output tokens), greedy and sampled ones."""
    name = service_class.value
    return [
        make_request(
            prompt_token_ids=SHARED + prompt(length, seed=100 * len(name) + index),
            max_tokens=max_tokens,
            request_id=f"{name}-{index}",
            service_class=service_class,
            ignore_eos=True,
            temperature=0.8 * (index % 2),
            seed=index,
        )
        for index, (length, max_tokens) in enumerate(shapes)
    ]


def all_requests() -> list[Request]:
    return requests(ServiceClass.OFFLINE, OFFLINE_SHAPES) + requests(ServiceClass.ONLINE, ONLINE_SHAPES)


def stopping_engine(executor: Any, **options: Any) -> Engine:
    """With a safepoint before every layer, at which offline slices are stopped for any online request."""
    config = SchedulerConfig(policy="slo", max_stop_s=1e-9, ttft_slo=0.5, tpot_slo=0.3, **options)
    profile = make_profile(linear_cost(token_s=0.002, step_s=0.02))
    return Engine(config, executor, VirtualClock(), profile)


def any_interleaving(num_examples: int, last_step: int, num_layers: int, **more: Any) -> Any:
    """A test of ``arrivals`` for ``run_disturbed``, of ``options`` for ``stopping_engine``, and of ``more``.

    Args:
        last_step: at which a request may arrive, before any of ``num_layers`` or after the last one.
    """
    places = st.tuples(st.integers(0, last_step), st.integers(0, num_layers))
    arrivals = st.lists(places, min_size=3, max_size=3, unique=True).map(
        lambda places: {place: number for number, place in enumerate(places)}
    )
    options = st.fixed_dictionaries(
        {
            "preemption": st.sampled_from(["suspend", "discard"]),
            "prefix_caching": st.booleans(),
            "max_num_batched_tokens": st.sampled_from([20, 64]),
            "max_num_seqs": st.just(16),
        }
    )
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    configured = settings(max_examples=examples(num_examples), deadline=None, suppress_health_check=checks)
    return lambda test: configured(given(arrivals=arrivals, options=options, **more)(test))


def before_layers(executor: Any, callback: Callable[[int, int, int], None] | None) -> None:
    """``callback`` is called with rank, step and layer before each layer on each rank of the executor."""
    for number, rank in enumerate(getattr(executor, "ranks", [executor])):
        model = rank._model
        assert isinstance(model, Interruptions)
        if callback is None:
            model.before_layer = lambda layer: None
        else:
            model.before_layer = lambda layer, number=number, rank=rank: callback(
                number, rank._stage.step, layer
            )


def run_disturbed(engine: Engine, executor: Any, arrivals: dict[tuple[int, int], int]) -> list[Request]:
    """Serve all requests. Those that are online arrive by number where ``arrivals`` has step and layer."""
    done = all_requests()
    offline, online = done[: len(OFFLINE_SHAPES)], done[len(OFFLINE_SHAPES) :]
    for request in offline:
        engine.add(request)
    arrived: set[int] = set()
    size = getattr(executor, "ranks", [executor])[0]._stage.shard.group.size

    def arrive(rank: int, step: int, layer: int) -> None:
        number = arrivals.get((step, layer))
        if rank % size == 0 and number is not None and number not in arrived:
            arrived.add(number)
            engine.arrive(online[number])

    before_layers(executor, arrive)
    for _ in range(60):
        engine.step()
        check_scheduler(engine.scheduler)
    before_layers(executor, None)
    for number, request in enumerate(online):
        if number not in arrived:
            engine.arrive(request)
    drain(engine, executor)
    return done


def drain(engine: Engine, executor: Any) -> None:
    """Serve all, after which no rank of the executor may keep anything."""
    while engine.has_unfinished:
        engine.step()
        check_scheduler(engine.scheduler)
    engine.step()
    assert engine.scheduler.kv.counts.referenced == 0
    for rank in getattr(executor, "ranks", [executor]):
        assert rank._states == {}
        assert not rank._suspended


def undisturbed(executor: Any, wanted: Sequence[Request]) -> dict[str, list[int]]:
    """Tokens of requests that nothing stops."""
    engine = Engine(SchedulerConfig(prefix_caching=False), executor, VirtualClock())
    for request in wanted:
        engine.add(request)
    drain(engine, executor)
    return tokens_of(wanted)


def tokens_of(served: Sequence[Request]) -> dict[str, list[int]]:
    return {request.request_id: list(request.output_token_ids) for request in served}
