"""The datasets that measure a prefix cache, from their options to the hits in the report."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backfill.bench.arrivals import ArrivalConfig
from backfill.bench.cache_figures import cache_figures
from backfill.bench.client import BenchClient
from backfill.bench.dataset import DatasetConfig, build_load, build_requests
from backfill.bench.endpoint import EndpointConfig
from backfill.bench.metrics import Metrics, compute_metrics
from backfill.bench.multi_turn import Conversation, MultiTurnConfig
from backfill.bench.prefix_repetition import PrefixRepetitionConfig
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.bench.report import format_report, result_json
from backfill.bench.runner import Run, send_load, unlike
from backfill.bench.serve import LoadConfig, ServeBenchmark
from backfill.core.errors import ConfigError
from tests.api.servers import TIMEOUT_S
from tests.bench.fake_server import FakeServer, prompt_tokens
from tests.bench.test_dataset import WordTokenizer
from tests.patience import with_more_time

AT_ONCE = ArrivalConfig()
PREFIXES = DatasetConfig(
    dataset_name="prefix_repetition",
    num_prompts=11,
    output_len=2,
    prefix_repetition=PrefixRepetitionConfig(
        prefix_repetition_prefix_len=20, prefix_repetition_suffix_len=5, prefix_repetition_num_prefixes=3
    ),
)
TURNS = DatasetConfig(
    dataset_name="multi_turn",
    num_prompts=3,
    output_len=2,
    multi_turn=MultiTurnConfig(
        multi_turn_num_turns=3,
        multi_turn_first_input_len=10,
        multi_turn_input_len=4,
        multi_turn_system_len=6,
        multi_turn_think_time=0.02,
        multi_turn_think_time_law="fixed",
    ),
)


class SpacedTokenizer(WordTokenizer):
    """Texts that can follow one another."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids) + " "


@asynccontextmanager
async def unwatched(run: Run) -> AsyncIterator[None]:
    yield


def bench(
    fake: FakeServer, dataset: DatasetConfig, *, repeats: int = 1, backend: Any = "openai", **load: Any
) -> tuple[Run, Metrics, str]:
    """The last of ``repeats`` equal runs, one request at a time."""

    async def run() -> tuple[Run, dict[str, object]]:
        async with fake.running():
            server = EndpointConfig(base_url=fake.url, backend=backend)
            limits = LoadConfig(**{"max_concurrency": 1, **load})
            benchmark = ServeBenchmark(
                server, dataset, AT_ONCE, limits, lambda name: (SpacedTokenizer(), 40_000), lambda text: None
            )
            for _ in range(repeats):
                result = await benchmark.run(unwatched)
            return result

    done, settings = asyncio.run(run())
    metrics = compute_metrics(done.records, duration_s=done.duration_s, num_requests=done.num_requests)
    return done, metrics, format_report(metrics, ("ttft",), settings)


def with_tokenizer(dataset: DatasetConfig, **changes: Any) -> DatasetConfig:
    return dataclasses.replace(dataset, tokenizer="words", **changes)


def conversations(dataset: DatasetConfig) -> list[Conversation]:
    load = build_load(dataset, AT_ONCE, tokenizer=SpacedTokenizer(), vocabulary_size=40_000)
    return [each for each in load if isinstance(each, Conversation)]


def test_prefixes_repeat_equally_often_in_an_order_by_seed() -> None:
    requests = build_requests(PREFIXES, AT_ONCE)
    prompts = [request.prompt for request in requests]
    assert [len(prompt) for prompt in prompts] == [25] * 11
    assert [request.output_tokens for request in requests] == [2] * 11
    prefixes = [tuple(prompt[:20]) for prompt in prompts]
    assert sorted(Counter(prefixes).values()) == [3, 4, 4]
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 11
    assert prefixes != sorted(prefixes, key=prefixes.index)
    first_of_each = {prefixes.index(prefix) for prefix in prefixes}
    assert [request.shared_tokens for request in requests] == [
        0 if index in first_of_each else 20 for index in range(11)
    ]
    assert build_requests(PREFIXES, AT_ONCE) == requests
    assert build_requests(with_tokenizer(PREFIXES, seed=1), AT_ONCE) != requests


def test_prefixes_as_text_have_their_lengths() -> None:
    tokenizer = SpacedTokenizer()
    # A small vocabulary, in which equal words often meet and become one token.
    requests = build_requests(PREFIXES, AT_ONCE, tokenizer=tokenizer, vocabulary_size=12, as_text=True)
    assert [len(tokenizer.encode(str(request.prompt))) for request in requests] == [25] * 11
    prefixes = Counter(" ".join(str(request.prompt).split()[:20]) for request in requests)
    assert sorted(prefixes.values()) == [3, 4, 4]
    with pytest.raises(ConfigError, match="`tokenizer`"):
        build_requests(PREFIXES, AT_ONCE, as_text=True)


def test_defaults_are_those_of_vllm() -> None:
    [request, *others] = build_requests(DatasetConfig(dataset_name="prefix_repetition"), AT_ONCE)
    assert (len(request.prompt), request.output_tokens, len(others)) == (512, 128, 999)
    assert len({tuple(each.prompt[:256]) for each in [request, *others]}) == 10


def test_every_hit_that_the_prefixes_allow_is_counted() -> None:
    _, metrics, report = bench(FakeServer(gap_s=0.0, has_cache=True), PREFIXES)
    cache = metrics.cache
    assert (cache.input_tokens, cache.cached_tokens, cache.shared_tokens) == (275, 160, 160)
    assert cache.hit_rate == cache.shared_rate == pytest.approx(160 / 275)
    assert cache.foreign_tokens == 0 and cache.turns == ()
    assert f"{'Cached prompt tokens:':<40} 160" in report
    assert f"{'Hit rate (% of prompt tokens):':<40} 58.18" in report
    assert "came from the server's cache" not in report


def test_a_cache_that_is_not_reported_is_not_zero() -> None:
    run, metrics, report = bench(FakeServer(gap_s=0.0), PREFIXES)
    assert metrics.cache.cached_tokens is metrics.cache.hit_rate is None
    assert f"{'Cached prompt tokens:':<40} not reported" in report
    assert f"{'Hit rate (% of prompt tokens):':<40} not reported" in report
    result = result_json(metrics, run, {})
    assert result["total_cached_tokens"] is None and result["cache_hit_rate"] is None
    assert result["highest_cache_hit_rate"] == pytest.approx(160 / 275)


def test_a_server_that_tells_only_hits() -> None:
    """vLLM leaves the count out where it is 0."""
    records = [
        RequestRecord(index, 0.0, 0.0, 10, outcome=Outcome.COMPLETED, cached_tokens=cached)
        for index, cached in enumerate([None, 8, None])
    ]
    cache = cache_figures(records)
    assert (cache.cached_tokens, cache.hit_rate, cache.foreign_tokens) == (8, pytest.approx(8 / 30), 8)
    records[1].shared_tokens = None
    unknown = cache_figures(records)
    assert unknown.shared_tokens is unknown.shared_rate is unknown.foreign_tokens is None
    assert unknown.cached_tokens == 8


@pytest.mark.parametrize("dataset", [DatasetConfig(num_prompts=4, input_len=30, output_len=2), TURNS])
def test_hits_of_an_earlier_run_are_told(dataset: DatasetConfig) -> None:
    fake = FakeServer(gap_s=0.0, has_cache=True)
    dataset = with_tokenizer(dataset)
    _, metrics, report = bench(fake, dataset, repeats=2)
    # The answers differ from run to run, so of conversations only the first turns are known.
    new_tokens = {"random": 4 * 30, "multi_turn": 3 * 16 - 2 * 6}[dataset.dataset_name]
    assert metrics.cache.foreign_tokens == new_tokens
    assert f"Warning: {new_tokens} prompt tokens came from the server's cache" in report
    assert "came from the server's cache" not in bench(fake, with_tokenizer(dataset, seed=1))[2]


@pytest.mark.parametrize("dataset", [DatasetConfig(num_prompts=4, input_len=30), PREFIXES, TURNS])
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_warm_ups_leave_nothing_in_the_cache(dataset: DatasetConfig, backend: str) -> None:
    fake = FakeServer(gap_s=0.0, has_cache=True)
    load = {"num_warmups": 2, "ready_check_timeout_sec": TIMEOUT_S}
    run, metrics, _ = bench(fake, with_tokenizer(dataset, output_len=2), backend=backend, **load)
    assert len(fake.bodies) == len(run.records) + 3
    assert len(prompt_tokens(fake.bodies[0])) > 5
    assert run.records[0].cached_tokens == 0
    assert metrics.cache.foreign_tokens == 0


def test_a_warm_up_is_as_long_and_begins_otherwise() -> None:
    warming = unlike(BenchRequest([1, 2, 3, 4, 5], 5, 7, history=({"role": "system", "content": "x"},)))
    assert (warming.prompt, warming.input_tokens, warming.history) == ([3, 4, 5, 1, 2], 5, ())


def test_conversations_have_their_lengths_and_are_the_same_for_a_seed() -> None:
    tokenizer = SpacedTokenizer()
    made = conversations(TURNS)
    assert [len(each.messages) for each in made] == [3] * 3
    for each in made:
        lengths = [len(tokenizer.encode(str(message.prompt))) for message in each.messages]
        assert lengths == [10, 4, 4]
        assert each.total_tokens == 6 + 10 + 4 + 4 + 3 * 2
        assert each.think_times_s == (0.02, 0.02)
    systems = {each.messages[0].history[0]["content"] for each in made}
    assert len(systems) == 1 and len(tokenizer.encode(systems.pop())) == 6
    assert [each.messages[0].shared_tokens for each in made] == [0, 6, 6]
    assert len({message.prompt for each in made for message in each.messages}) == 9
    assert made == conversations(TURNS)
    assert made != conversations(with_tokenizer(TURNS, seed=1))
    with pytest.raises(ConfigError, match="multi_turn needs `tokenizer`"):
        build_load(TURNS, AT_ONCE)


def test_think_times_leave_the_messages_alone() -> None:
    config = MultiTurnConfig(multi_turn_num_turns=201, multi_turn_think_time=0.5, multi_turn_input_len=1)
    [drawn] = conversations(DatasetConfig(dataset_name="multi_turn", num_prompts=1, multi_turn=config))
    times = drawn.think_times_s
    assert len(times) == 200 and len(set(times)) == 200
    assert sum(times) / 200 == pytest.approx(0.5, rel=0.2)
    fixed = MultiTurnConfig(
        multi_turn_num_turns=201, multi_turn_think_time_law="fixed", multi_turn_input_len=1
    )
    [same] = conversations(DatasetConfig(dataset_name="multi_turn", num_prompts=1, multi_turn=fixed))
    assert same.messages == drawn.messages and set(same.think_times_s) == {1.0}


def test_the_arrivals_start_conversations() -> None:
    rate = ArrivalConfig(request_rate=2.0, burstiness=float("inf"))
    load = build_load(TURNS, rate, tokenizer=SpacedTokenizer(), vocabulary_size=40_000)
    assert [each.due_at_s for each in load] == [0.5, 1.0, 1.5]


def test_chat_turns_hold_the_whole_conversation() -> None:
    fake = FakeServer(gap_s=0.001, has_cache=True)
    run, metrics, report = bench(fake, with_tokenizer(TURNS), backend="openai-chat", max_concurrency=None)
    assert run.num_requests == len(run.records) == 9 and metrics.num_completed == 9
    answers = dict(zip((json.dumps(body["messages"]) for body in fake.bodies), fake.answers, strict=True))
    lasts = [body["messages"] for body in fake.bodies if len(body["messages"]) == 6]
    assert len(lasts) == 3
    for last in lasts:
        assert [message["role"] for message in last] == ["system", *["user", "assistant"] * 2, "user"]
        assert last[2]["content"] == answers[json.dumps(last[:2])]
        assert last[4]["content"] == answers[json.dumps(last[:4])]
    by_turn = metrics.cache.turns
    assert [(turn.turn, turn.num_completed, turn.input_tokens) for turn in by_turn] == [
        (1, 3, 3 * 16),
        (2, 3, 3 * (16 + 2 + 4)),
        (3, 3, 3 * (22 + 2 + 4)),
    ]
    # All that was said before comes from the cache: prompts and answers.
    assert [turn.cached_tokens for turn in by_turn[1:]] == [3 * 18, 3 * 24]
    assert by_turn[2].hit_rate == pytest.approx(24 / 28)
    assert by_turn[0].median_ttft_s > 0
    assert report.count(f"{100 * 24 / 28:.2f}") == 1
    by_turn_json = result_json(metrics, run, {}, is_detailed=True)["by_turn"]
    assert [turn["cache_hit_rate"] for turn in by_turn_json][1:] == pytest.approx([18 / 22, 24 / 28])


def test_completions_turns_are_one_text() -> None:
    fake = FakeServer(gap_s=0.0, has_cache=True)
    _, metrics, _ = bench(fake, with_tokenizer(TURNS, num_prompts=1))
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert second.startswith(f"{first}\n{fake.answers[0]}\n")
    assert third.startswith(f"{second}\n{fake.answers[1]}\n")
    assert metrics.cache.cached_tokens == metrics.cache.shared_tokens == 18 + 24


def test_a_turn_waits_for_the_answer_and_the_think_time() -> None:
    with_more_time(check_turns)


def check_turns(factor: float) -> None:
    think_time = MultiTurnConfig(
        multi_turn_num_turns=3, multi_turn_think_time=0.1, multi_turn_think_time_law="fixed"
    )
    dataset = with_tokenizer(TURNS, num_prompts=2, multi_turn=think_time)
    run, metrics, _ = bench(FakeServer(gap_s=0.02), dataset, max_concurrency=None)
    assert sorted(record.index for record in run.records) == list(range(6))
    of_one = sorted((record for record in run.records if record.index < 3), key=lambda each: each.index)
    assert [record.turn for record in of_one] == [1, 2, 3]
    for before, after in itertools.pairwise(of_one):
        assert before.sent_at_s is not None and after.sent_at_s is not None
        ended_at_s = before.sent_at_s + before.ended_after_s
        assert after.due_at_s == pytest.approx(ended_at_s + 0.1)
        assert after.sent_at_s >= ended_at_s + 0.1
    assert metrics.peak_concurrency == 2
    assert metrics.send_lag.median < 0.5 * factor


def test_a_failed_turn_ends_its_conversation() -> None:
    class Failing(FakeServer):
        async def _complete(self, request: Any) -> Any:
            if len(self.bodies) == 1:
                raise RuntimeError
            return await super()._complete(request)

    run, metrics, _ = bench(Failing(gap_s=0.0), with_tokenizer(TURNS, num_prompts=1))
    assert [record.outcome for record in run.records] == [Outcome.COMPLETED, Outcome.FAILED]
    assert (metrics.num_completed, metrics.num_failed, metrics.num_not_sent) == (1, 1, 1)


def test_ctrl_c_ends_a_think_time() -> None:
    async def interrupt(url: str) -> Run:
        stop, progress = asyncio.Event(), Run(3)
        waiting = dataclasses.replace(conversations(TURNS)[0], think_times_s=(0.0, 30.0))
        async with BenchClient(EndpointConfig(base_url=url).resolve()) as client:
            sending = asyncio.create_task(send_load(client, [waiting], stop=stop, run=progress))
            while progress.count(Outcome.COMPLETED) < 2:
                await asyncio.sleep(0.01)
            stop.set()
            return await sending

    async def run() -> Run:
        async with FakeServer(gap_s=0.0).running() as fake:
            return await interrupt(fake.url)

    ended = asyncio.run(run())
    assert ended.is_interrupted and ended.duration_s < 20
    assert [record.outcome for record in ended.records] == [Outcome.COMPLETED] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_repetition_num_prefixes": 0}, "`prefix_repetition_num_prefixes` must be at least 1"),
        ({"prefix_repetition_prefix_len": -1}, "`prefix_repetition_prefix_len` must be at least 0"),
        ({"prefix_repetition_output_len": 0}, "`prefix_repetition_output_len` must be at least 1"),
        ({"prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 0}, "must not both be 0"),
        ({"multi_turn_first_input_len": 0}, "`multi_turn_first_input_len` must be at least 1"),
        ({"multi_turn_output_len": -3}, "`multi_turn_output_len` must be at least 1"),
        ({"multi_turn_system_len": -1}, "`multi_turn_system_len` must be at least 0"),
        ({"multi_turn_think_time": float("nan")}, "`multi_turn_think_time` must be a number"),
    ],
)
def test_out_of_range(options: dict[str, Any], message: str) -> None:
    kind = PrefixRepetitionConfig if "prefix" in next(iter(options)) else MultiTurnConfig
    with pytest.raises(ConfigError, match=message):
        kind(**options).validate()
