from __future__ import annotations

import pytest

from backfill.core.request import FinishReason, Request, RequestId, RequestStatus, ServiceClass
from backfill.scheduling.policies.baselines import PriorityPolicy
from tests.builders import make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import Bench, sizes


def make_bench(*requests: Request, **options: int) -> Bench:
    defaults = {
        "num_blocks": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_prefill_chunk_tokens": 32,
    }
    bench = Bench(PriorityPolicy(), **{**defaults, **options})  # type: ignore[arg-type]
    bench.add(*requests)
    return bench


def run_to_end(bench: Bench) -> None:
    while bench.scheduler.has_unfinished:
        bench.step()


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    bench = make_bench(make_request(10, max_tokens=1), max_num_batched_tokens=4, max_num_seqs=4)
    slices = [bench.step().slices[0] for _ in range(3)]
    assert [(each.start, each.num_tokens) for each in slices] == [(0, 4), (4, 4), (8, 2)]
    assert [each.samples for each in slices] == [False, False, True]
    assert not bench.scheduler.has_unfinished


def test_decodes_keep_their_tokens_beside_a_long_prefill() -> None:
    bench = make_bench(make_request(3, max_tokens=6, request_id="decoding"), max_num_batched_tokens=8)
    bench.step()
    # More urgent than the one that decodes; still, the decode's token comes first.
    bench.add(make_request(20, priority=-1, request_id="long"))
    for _ in range(2):
        assert sizes(bench.step()) == {"decoding": 1, "long": 7}


def test_waiting_requests_join_in_order_of_class_priority_and_arrival() -> None:
    bench = make_bench(
        make_request(request_id="offline", service_class=ServiceClass.OFFLINE),
        make_request(request_id="late", arrived_at_s=2.0),
        make_request(request_id="early", arrived_at_s=1.0),
        make_request(request_id="urgent", priority=-1, arrived_at_s=3.0),
        max_num_seqs=3,
    )
    assert list(sizes(bench.step())) == ["urgent", "early", "late"]


def test_the_least_urgent_is_preempted_when_blocks_run_out_and_recomputed_later() -> None:
    urgent = make_request(8, max_tokens=6, request_id="urgent", arrived_at_s=0.0)
    later = make_request(4, max_tokens=6, request_id="later", arrived_at_s=1.0)
    bench = make_bench(urgent, later, num_blocks=4)
    bench.step()
    bench.clock.advance(3.0)
    preempted_at_s = bench.clock.now_s()
    assert len(bench.scheduler.requests.running) == 2
    new = make_request(2, max_tokens=1, arrived_at_s=2.0, request_id="new")
    plan = bench.step(new)  # the two need a third and a second block, one is left
    assert sizes(plan) == {"urgent": 1}, "and nobody is admitted in a step that preempts"
    assert later.status is RequestStatus.PREEMPTED
    assert later.num_computed_tokens == 4, "nobody needed its block yet"
    counters = bench.scheduler.counters[ServiceClass.ONLINE]
    assert counters.num_preemptions == 1
    assert (later.paused_at_s, later.pauses) == (preempted_at_s, [])
    run_to_end(bench)
    assert later.last_token_at_s is not None and urgent.pauses == []
    ((paused_at_s, back_at_s),) = later.pauses
    assert paused_at_s == preempted_at_s < back_at_s < later.last_token_at_s
    assert counters.num_recomputed_tokens == 4
    assert bench.executor.num_tokens["later"] == 10
    admitted = [each.request_id for plan in bench.executor.plans[1:] for each in plan.admitted]
    assert admitted == ["new"], "the executor kept the tokens of the others"


def test_blocks_are_reserved_for_later_chunks() -> None:
    requests = [make_request(28, max_tokens=4, request_id=f"r{i}") for i in range(4)]
    bench = make_bench(*requests, num_blocks=20, max_prefill_chunk_tokens=4)
    run_to_end(bench)
    assert bench.scheduler.counters[ServiceClass.ONLINE].num_preemptions == 0


@pytest.mark.parametrize(
    ("next_token", "sampling", "reason", "num_tokens", "reported"),
    [
        (2, {}, FinishReason.STOP, 1, None),
        (2, {"ignore_eos": True}, FinishReason.LENGTH, 4, None),
        (2, {"min_tokens": 3}, FinishReason.STOP, 3, None),
        (9, {"stop_token_ids": (9,)}, FinishReason.STOP, 1, 9),
        (9, {"stop_token_ids": (9,), "ignore_eos": True}, FinishReason.STOP, 1, 9),
        (7, {}, FinishReason.LENGTH, 4, None),
    ],
)
def test_end_tokens_stop_tokens_and_lengths_end_outputs(
    next_token: int, sampling: dict[str, object], reason: FinishReason, num_tokens: int, reported: int | None
) -> None:
    request = make_request(max_tokens=4, **sampling)  # type: ignore[arg-type]
    bench = make_bench(request, next_token=next_token)
    while bench.scheduler.has_unfinished:
        plan = bench.scheduler.plan_step(0.0)
        (committed,) = bench.scheduler.commit(plan, bench.executor.run(plan), now_s=0.0)
    assert committed.stop_token_id == reported
    assert (request.finish_reason, len(request.output_token_ids)) == (reason, num_tokens)


def test_finishing_a_request_in_any_state_frees_it_once() -> None:
    running, waiting = (
        make_request(request_id="running"),
        make_request(request_id="waiting", arrived_at_s=1.0),
    )
    bench = make_bench(running, waiting, max_num_seqs=1)
    scheduler = bench.scheduler
    bench.step()
    for request_id in ("running", "waiting"):
        assert scheduler.finish(RequestId(request_id), FinishReason.ABORT) is not None
        assert scheduler.finish(RequestId(request_id), FinishReason.ABORT) is None
        check_scheduler(scheduler)
    assert scheduler.kv.counts.referenced == 0
    assert bench.step().released == ("running",)
