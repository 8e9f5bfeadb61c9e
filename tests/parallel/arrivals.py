"""Stop requests at random moments of steps of a trivial model on several ranks."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backfill.core.block import pack_block_ref
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.executor import ExecutorInfo
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.decoder import HiddenState
from backfill.models.shard import ModelShard
from backfill.parallel.load import connect_by_memory
from backfill.parallel.rank import RankContext
from backfill.parallel.stage_links import RowShape
from tests.parallel.rank_threads import CPU, RankThreads, Sizes

_ROWS = {"offline": 3, "online": 2}
_NUM_LAYERS = 6


class AddingModel:
    """Each layer adds the number of ranks to its rows, by one sum over the ranks."""

    def __init__(self, shard: ModelShard) -> None:
        self.num_layers = shard.num_layers
        self.shard = shard

    def embed(self, token_ids: Tensor, batch: object) -> HiddenState:
        return HiddenState(token_ids.float()[:, None].repeat(1, 2), None)

    def run_layer(self, index: int, state: HiddenState, kv_pool: Tensor, batch: object) -> HiddenState:
        assert index in self.shard.layers
        return HiddenState(
            state.residual + self.shard.group.all_reduce(torch.ones_like(state.residual)), None
        )

    def logits(self, state: HiddenState, rows: Tensor) -> Tensor | None:
        """The most likely token is the sum of what was embedded and what layers have added."""
        gathered = self.shard.group.gather_columns(torch.zeros(len(rows), 200 // self.shard.group.size))
        if gathered is None:
            return None
        return gathered.scatter_(1, state.residual[rows][:, :1].long(), 1.0)


def load_adding(context: RankContext) -> TorchExecutor:
    links = connect_by_memory(context, RowShape(16, 2, torch.float32))
    each = _NUM_LAYERS // context.pipeline_parallel_size
    layers = range(each * context.stage, each * (context.stage + 1))
    info = ExecutorInfo(8, 8, 64, 200, (), "cpu", "float32", num_layers=_NUM_LAYERS, can_stop=True)
    pool = torch.zeros(8, len(layers), 2, 1, 8, 1)
    model: Any = AddingModel(ModelShard(links.group, layers, _NUM_LAYERS))
    stage = Stage(model.shard, links, context.state.stops)
    return TorchExecutor(model, pool, info, MicroBatchStreams(CPU, 1), stage=stage)


def _slice(name: str) -> ScheduledSlice:
    block = pack_block_ref(sorted(_ROWS).index(name))
    return ScheduledSlice(
        RequestId(name), 0, _ROWS[name], (block,), samples=True, preemptible=name == "offline"
    )


@dataclass
class Arrivals:
    """What came of the stop requests.

    Attributes:
        stopped: how many steps stopped after so many layers.
        resumed: steps that went on after a stop.
    """

    stopped: Counter[int] = field(default_factory=Counter)
    num_resumed: int = 0
    num_unstopped: int = 0


class _Asker:
    """A thread that asks steps to stop, each after a random time."""

    def __init__(self, ranks: RankThreads, step_s: float) -> None:
        self._ranks = ranks
        self._random = random.Random(0)
        self._step_s = step_s
        self._begun = threading.Semaphore(0)
        self._step = 0
        self._ends = False
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        self._step = step
        self._begun.release()

    def _ask(self) -> None:
        while self._begun.acquire() and not self._ends:
            time.sleep(self._random.uniform(0.0, self._step_s))
            self._ranks.request_stop(self._step)

    def end(self) -> None:
        self._ends = True
        self._begun.release()
        self._thread.join()


def run_arrivals(sizes: Sizes, num_arrivals: int) -> Arrivals:
    """Steps with one stop request each. Every stopped step is resumed, and may be stopped again.

    Raises: AssertionError if ranks differ in where they stop, or a token is not that of all layers.
    """
    ranks = RankThreads(sizes, load_adding)
    rng, found = random.Random(0), Arrivals()
    slices = tuple(_slice(name) for name in _ROWS)
    tokens = dict.fromkeys(_ROWS, 3 + _NUM_LAYERS * sizes.tensor)
    admitted = tuple(
        AdmittedRequest(RequestId(name), (3,) * count, SamplingParams(max_tokens=1, temperature=0.0))
        for name, count in _ROWS.items()
    )
    step = 0
    began_at_s = time.monotonic()
    for _ in range(20):
        ranks.run(StepPlan(step, Compute(slices), admitted))
        step += 1
    asker = _Asker(ranks, 1.5 * (time.monotonic() - began_at_s) / 20)
    try:
        done_arrivals = 0
        while done_arrivals < num_arrivals:
            points = Safepoints(rng.choice((1, 1, 2)), suspends=rng.random() < 0.7)
            step, done_arrivals = step + 1, done_arrivals + 1
            asker.begin(step)
            plan = StepPlan(step, Compute(slices, safepoints=points), admitted, (*_ids(),))
            sampled = _check(ranks, sizes, plan, found)
            left = slices[:1]
            while sampled.suspended:
                found.num_resumed += 1
                step = step + 1
                if done_arrivals < num_arrivals:
                    done_arrivals += 1
                    asker.begin(step)
                work = Resume(left, _NUM_LAYERS - sampled.layers_done, 0.0, points)
                sampled = _check(ranks, sizes, StepPlan(step, work), found)
            for token in sampled.sampled:
                assert token.token_id == tokens[token.request_id], token
    finally:
        asker.end()
        ranks.close()
    return found


def _ids() -> list[RequestId]:
    return [RequestId(name) for name in _ROWS]


def _check(ranks: RankThreads, sizes: Sizes, plan: StepPlan, found: Arrivals) -> StepOutcome:
    outcome = ranks.run(plan)
    for stage in range(sizes.pipeline):
        of_stage = ranks.outcomes[stage * sizes.tensor : (stage + 1) * sizes.tensor]
        stops = {(each.layers_done, each.suspended, each.discarded) for each in of_stage if each is not None}
        assert len(stops) == 1, f"ranks of stage {stage} differ: {stops}"
        layers_done = stops.pop()[0]
        assert layers_done in (0, outcome.layers_done)
    if outcome.stopped:
        found.stopped[outcome.layers_done] += 1
        assert [each.request_id for each in outcome.sampled] == [
            each
            for each in _ids()
            if each not in outcome.stopped and each in {s.request_id for s in plan.slices}
        ]
    else:
        found.num_unstopped += 1
        assert len(outcome.sampled) == len(plan.slices)
    return outcome
