"""A random load on a small two-tier cache, with every invariant checked after every step.

Chats of several turns, shared prefixes, two owners, aborts, failing steps, stopped steps and slow copies. The
executor knows the content of every slot, so a request that reads another token's KV fails at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import get_args

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import CheckpointingName, KVLayoutName, PolicyName, PreemptionMode, RestoreMode
from backfill.core.request import FinishReason, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.engine.engine import Engine
from tests.builders import linear_cost, make_profile, make_request
from tests.integrity import check_scheduler
from tests.scheduling.caching import Unforgiving
from tests.scheduling.test_two_tier_schedules import BLOCK_SIZE, Setting
from tests.shared import examples

STEP_S = 0.05
MOST_UNFINISHED = 12


@dataclass
class Soak:
    """One engine under random load.

    Attributes:
        num_finished: requests by the reason for which they ended.
    """

    seed: int
    num_finished: dict[FinishReason, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        policy: PolicyName = rng.choice(("slo", "slo", "conserve", "bros", "priority", "fcfs", "round-robin"))
        setting = Setting(
            policy=policy,
            can_stop=policy in ("slo", "conserve") and rng.random() < 0.7,
            num_blocks=rng.choice((12, 16, 24)),
            num_host_blocks=rng.choice((0, 3, 12, 24)),
            max_num_seqs=rng.choice((2, 4, 8)),
            max_num_batched_tokens=rng.choice((12, 32)),
            checkpointing=rng.choice(get_args(CheckpointingName)),
            restore=rng.choice(get_args(RestoreMode)),
            preemption=rng.choice(get_args(PreemptionMode)),
            prefix_caching=rng.random() < 0.85,
            kv_layout=rng.choice(get_args(KVLayoutName)),
            completes=rng.choice((0.1, 0.5, 1.0)),
            fails=rng.choice((0.0, 0.02)),
        )
        self.num_blocks = setting.num_blocks
        self.clock = VirtualClock()
        self.executor = setting.executor(self.seed)
        config = replace(setting.config(), max_prefill_chunk_tokens=12, ttft_slo=10.0, tpot_slo=1.0)
        self.engine = Engine(
            config,
            Unforgiving(self.executor),
            self.clock,
            make_profile(linear_cost(token_s=1e-3, step_s=STEP_S)),
        )
        self._unfinished: list[Request] = []
        self._conversations: list[tuple[str, list[int]]] = []

    def run(self, virtual_s: float) -> None:
        """Load for so long, then all requests to their end.

        Raises: AssertionError or BrokenPlan if anything is wrong.
        """
        while self.clock.now_s() < virtual_s or self.engine.has_work:
            if self.clock.now_s() < virtual_s:
                self._load()
            self.engine.step()
            check_scheduler(self.engine.scheduler)
            assert self.engine.has_work or not self.engine.has_unfinished, (
                "it stopped with unfinished requests"
            )
            self.clock.advance(self.rng.uniform(0.5, 1.5) * STEP_S)
            self._collect()
            assert self.clock.now_s() < virtual_s + 1000.0, "it hangs"
        kv = self.engine.scheduler.kv
        assert kv.counts.referenced == 0 and kv.num_copies_in_flight == 0
        assert not self.executor.num_tokens, "the executor was told to forget all"
        assert not self._unfinished

    def _load(self) -> None:
        rng = self.rng
        if len(self._unfinished) < MOST_UNFINISHED and rng.random() < 0.25:
            request = self._next_request()
            self._unfinished.append(request)
            assert self.engine.add(request) is None
        if self._unfinished and rng.random() < 0.01:
            self.engine.abort([rng.choice(self._unfinished).request_id])

    def _next_request(self) -> Request:
        rng, most = self.rng, self.num_blocks * BLOCK_SIZE
        if self._conversations and rng.random() < 0.5:
            owner, history = rng.choice(self._conversations)
            history = history[: rng.randint(1, len(history))] if rng.random() < 0.3 else history
        else:
            owner, history = rng.choice(("a", "a", "b")), [10 + rng.randrange(3)] * rng.choice((0, 9, 20))
        prompt = [*history, *(rng.randrange(3, 199) for _ in range(rng.randint(1, 16)))][: most - 2]
        request = make_request(
            prompt_token_ids=prompt,
            max_tokens=rng.randint(1, min(24, most - len(prompt))),
            service_class=rng.choice((ServiceClass.ONLINE, ServiceClass.OFFLINE, ServiceClass.OFFLINE)),
            arrived_at_s=self.clock.now_s(),
            slo=rng.choice((None, None, SLO(ttft_s=2.0, tpot_s=0.2))),
            complete_by_s=rng.choice((None, None, self.clock.now_s() + rng.uniform(1.0, 60.0))),
            owner=owner,
            ignore_eos=True,
        )
        self.executor.namespaces[request.request_id] = owner
        return request

    def _collect(self) -> None:
        for request in [each for each in self._unfinished if each.status is RequestStatus.FINISHED]:
            reason = request.finish_reason
            assert reason is not None
            self._unfinished.remove(request)
            self.executor.namespaces.pop(request.request_id)
            self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
            if reason is FinishReason.LENGTH:
                assert len(request.output_token_ids) == request.sampling.max_tokens
                self._conversations.append(
                    (request.owner, [*request.prompt_token_ids, *request.output_token_ids])
                )
                del self._conversations[:-8]
            elif reason is FinishReason.ERROR:
                assert self.executor.fail_at_step is not None


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]
)
def test_a_random_load_leaves_the_cache_whole(seed: int) -> None:
    soak = Soak(seed)
    soak.run(12.0 * examples(1))
    assert soak.num_finished
