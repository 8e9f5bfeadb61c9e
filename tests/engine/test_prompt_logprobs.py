"""Log probabilities of prompts: each token's once, whatever is cached, cut, preempted or divided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from backfill.core.clock import VirtualClock
from backfill.core.config import CheckpointingName, SchedulerConfig
from backfill.core.plan import TokenLogprobs
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.engine.engine import Engine
from backfill.execution import prompt_scoring
from backfill.execution.create import create_torch_executor
from backfill.execution.executor import Executor
from tests.builders import make_profile, make_request
from tests.execution.tiny import model_fixture, tiny_config
from tests.integrity import check_scheduler
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny

LENGTHS = [70, 41, 9, 1, 70]  # the last prompt is the first one, and in the cache when it comes
TOP = [2, 0, 1, 3, 2]
ROOM, TOO_FEW = 64, 13  # blocks of 8 tokens

Scores = dict[RequestId, list[TokenLogprobs]]


model_dir = model_fixture("llama")


def executor_of(model_dir: Path, num_blocks: int = ROOM, **changes: Any) -> Executor:
    return create_torch_executor(tiny_config(model_dir, num_blocks, ROOM, **changes))


def requests(service_class: ServiceClass = ServiceClass.OFFLINE) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 190, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts[-1] = prompts[0]
    return [
        make_request(
            prompt_token_ids=prompt,
            max_tokens=20,
            request_id=f"r{index}",
            service_class=service_class,
            prompt_logprobs=TOP[index],
            ignore_eos=True,
        )
        for index, prompt in enumerate(prompts)
    ]


def scored(
    executor: Executor,
    others: Sequence[Request] = (),
    every: int = 3,
    config: SchedulerConfig | None = None,
    **limits: Any,
) -> tuple[Scores, Engine]:
    """The log probabilities of all prompts. ``others`` arrive meanwhile, one ``every`` so many steps."""
    engine = Engine(config or SchedulerConfig(**limits), executor, VirtualClock(), make_profile())
    for request in requests():
        assert engine.add(request) is None
    waiting, scores = list(others), Scores()
    for step in range(10_000):
        if waiting and step % every == every - 1:
            engine.add(waiting.pop(0))
        for output in engine.step():
            if output.prompt_logprobs is not None:
                assert output.request_id not in scores, "with the first token alone"
                scores[output.request_id] = output.prompt_logprobs
        check_scheduler(engine.scheduler)
        if not engine.has_unfinished:
            break
    assert not engine.scheduler.prompt_scores
    return scores, engine


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Scores:
    """In whole prompts, without a cache."""
    return scored(executor_of(model_dir), prefix_caching=False)[0]


@torch.inference_mode()
def test_they_are_those_of_transformers(model_dir: Path, expected: Scores) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for request, num_top in zip(requests(), TOP, strict=True):
        prompt = list(request.prompt_token_ids)
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = expected.get(request.request_id, [])
        assert len(found) == len(prompt) - 1
        for row, token_id, each in zip(logprobs, prompt[1:], found, strict=False):
            assert each.logprob == pytest.approx(float(row[token_id]), abs=2e-5)
            assert each.rank == int((row > row[token_id]).sum()) + 1
            values, ids = row.topk(num_top)
            assert [top_id for top_id, _ in each.top] == ids.tolist()
            assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=2e-5)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_prefill_chunk_tokens": 5},
        {"max_prefill_chunk_tokens": 16, "max_num_batched_tokens": 24, "max_num_seqs": 2},
        {"kv_layout": "bidirectional", "max_num_batched_tokens": 32, "max_num_seqs": 4},
    ],
    ids=["chunks", "small steps", "bidirectional"],
)
def test_chunks_and_the_cache_change_no_bit(
    model_dir: Path, expected: Scores, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scoring, "_ROWS_AT_ONCE", 7)
    plain = make_request(prompt_token_ids=requests()[0].prompt_token_ids, max_tokens=4, request_id="plain")
    scores, engine = scored(executor_of(model_dir), [plain], **limits)
    assert scores == expected
    hits = {each: counters.num_prefix_hit_tokens for each, counters in engine.scheduler.counters.items()}
    assert hits[ServiceClass.OFFLINE] == 0 < hits[ServiceClass.ONLINE], "what is scored serves others"


@pytest.mark.parametrize("checkpointing", ["none", "adaptive"])
def test_preemption_and_recomputation_lose_and_double_none(
    model_dir: Path, expected: Scores, checkpointing: CheckpointingName
) -> None:
    """Prompts are preempted in their middle, and not all that was computed of them is found again."""
    online = [
        make_request(60, 2, request_id=f"online-{index}", ignore_eos=True, prompt_logprobs=index % 2 or None)
        for index in range(6)
    ]
    limits = {"max_prefill_chunk_tokens": 8, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    config = SchedulerConfig(policy="slo", checkpointing=checkpointing, **limits)
    executor = executor_of(model_dir, TOO_FEW, scheduler=config)
    scores, engine = scored(executor, online, every=12, config=config)
    counters = engine.scheduler.counters[ServiceClass.OFFLINE]
    assert counters.num_preemptions > 3
    assert counters.num_recomputed_tokens if checkpointing == "none" else counters.num_restored_tokens
    assert {name: each for name, each in scores.items() if not name.startswith("online")} == expected
    assert {len(scores[RequestId(f"online-{index}")]) for index in (1, 3, 5)} == {59}


def test_a_step_that_fails_loses_none(model_dir: Path, expected: Scores) -> None:
    executor = executor_of(model_dir)
    run, num_steps = executor.run, 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        outcome = run(*arguments)
        if num_steps == 2:
            raise RuntimeError("after it was computed")
        return outcome

    executor.run = failing  # type: ignore[method-assign]
    scores, _ = scored(executor, max_prefill_chunk_tokens=24, max_num_batched_tokens=24, max_num_seqs=2)
    assert scores == expected


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 2),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Sizes(tensor=2), Sizes(pipeline=2))),
    ],
    ids=str,
)
def test_ranks_have_those_of_one_process(model_dir: Path, expected: Scores, sizes: Sizes) -> None:
    executor = RankThreads(sizes, load_tiny(model_dir))
    try:
        scores, _ = scored(executor, max_prefill_chunk_tokens=16, max_num_batched_tokens=32, max_num_seqs=8)
    finally:
        executor.close()
    assert scores.keys() == expected.keys()
    for name, found in scores.items():
        assert [each.logprob for each in found] == pytest.approx(
            [e.logprob for e in expected[name]], abs=2e-5
        )
        assert [each.rank for each in found] == [each.rank for each in expected[name]]


def test_a_step_scores_a_bounded_number_of_tokens(model_dir: Path) -> None:
    sizes = []
    executor = executor_of(model_dir)
    run = executor.run

    def noting(plan: Any, *arguments: Any) -> Any:
        sizes.append(plan.num_tokens)
        return run(plan, *arguments)

    executor.run = noting  # type: ignore[method-assign]
    engine = Engine(SchedulerConfig(), executor, VirtualClock())
    for index in range(7):
        engine.add(make_request(60, 1, request_id=f"s{index}", prompt_logprobs=0))
    while engine.has_unfinished:
        engine.step()
    assert max(sizes) <= 256 and sum(sizes) == 420
