"""Servers with little memory, several processes or much else to do give the answers of any other."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.offloading.record import PerformanceRecord
from tests.api.servers import MODEL, RunningServer, ending, launch, quick_profile, small_server, wait_until
from tests.builders import make_request
from tests.costs.test_refine import scaled
from tests.parallel.processes import children, wait_ended

# 60 blocks of 16 KiB hold 960 tokens; the offline requests below need 1,500.
POOL = ("--kv-gib", "0.00092", "--host-kv-gib", "0.01")
OFFLINE = [list(range(100 + 7 * index, 200 + 9 * index)) for index in range(6)]
ONLINE = [list(range(5000 + 11 * index, 5060 + 11 * index)) for index in range(6)]
NUM_OFFLINE_TOKENS = 150
_salts = itertools.count()


def complete(server: RunningServer, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
    """The output. Each call has a salt of its own, so it finds no KV of earlier calls in the cache."""
    return server.tokens(prompt, max_tokens, cache_salt=f"call {next(_salts)}", **fields)


@pytest.mark.slow  # without HTTP: tests/engine/test_restored_tokens.py
def test_preemption_does_not_change_tokens(small_model: Path, tmp_path: Path) -> None:
    options = (*POOL, "--max-model-len", "400")
    with small_server(small_model, *options, data_dir=tmp_path) as server:
        wait_until(lambda: "backfill:host_kv_cache" in server.http.get("/metrics").text, "its gauges")
        alone = [complete(server, prompt, NUM_OFFLINE_TOKENS) for prompt in OFFLINE]
        alone += [complete(server, prompt, 12) for prompt in ONLINE]
        assert len({tuple(tokens) for tokens in alone}) == len(alone), "tokens depend on the prompt"
        assert server.metric("backfill:num_preemptions_total") == 0

        with ThreadPoolExecutor(16) as pool:
            offline = [
                pool.submit(complete, server, prompt, NUM_OFFLINE_TOKENS, service_tier="flex")
                for prompt in OFFLINE
            ]
            # One after another, so that there is always one to preempt for.
            while not all(each.done() for each in offline):
                online = [complete(server, prompt, 12) for prompt in ONLINE]
                assert online == alone[len(OFFLINE) :]

        assert [each.result() for each in offline] == alone[: len(OFFLINE)]
        num_preempted = server.metric("backfill:num_preemptions_total", **{"class": "offline"})
        assert num_preempted > 0
        checkpointed = server.metric("backfill:checkpointed_tokens_total")
        restored = server.metric("backfill:restored_tokens_total", **{"class": "offline"})
        taken = server.metric("backfill:reclaimed_tokens_total")
        overwritten = server.metric("backfill:kv_slots_overwritten_total")  # in shared blocks
        # A last block comes back whole, also if only a part of it was overwritten.
        assert 0 < restored <= taken + overwritten + 15 * num_preempted
        assert server.metric("backfill:checkpointed_bytes_total") == checkpointed * 1024
        computed = server.metric("backfill:iteration_tokens_total_sum")
        assert server.metric("backfill:recomputed_tokens_total") < 0.05 * computed
        assert server.metric("backfill:prefix_cache_hits_total") == 0, "every token was computed"
        for name in ("kv_cache_usage_perc", "host_kv_cache_usage_perc", "kv_blocks_checkpointed"):
            # Copies may end after the last request.
            wait_until(lambda gauge=f"backfill:{name}": server.metric(gauge) == 0, f"free blocks: {name}")


PROMPTS = [list(range(100 + 7 * index, 160 + 9 * index)) for index in range(6)]


def serve(server: RunningServer) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of online and offline requests at the same time, and the metrics of offloading."""
    counted = "backfill:generation_tokens_total"
    before = server.metric(counted)
    with ThreadPoolExecutor(6) as pool:
        asked = zip(PROMPTS, ["flex", "default"] * 3, strict=True)
        tokens = list(
            pool.map(lambda each: server.tokens(each[0], max_tokens=24, service_tier=each[1]), asked)
        )
    names = ("offload_interval", "offload_transferred_bytes_total", "offload_stall_seconds_total")
    wait_until(lambda: server.metric(counted) >= before + 144, "all tokens are counted")
    return tokens, {name: server.metric(f"backfill:{name}") for name in names}


@pytest.mark.slow  # without HTTP: tests/execution/test_offloading.py
def test_tokens_and_metrics_of_a_server_with_offloaded_layers(
    server: RunningServer, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 layers all are offloaded; the device has memory for two staging buffers."""
    expected, metrics = serve(server)
    assert set(metrics.values()) == {0.0}
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    objectives = ("--ttft-slo", "1000", "--tpot-slo", "1000")  # every interval holds them
    few_loads = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256")  # a short measurement
    options = ("--device-memory", "0.35", "--offload-interval", "auto", *objectives, *few_loads)
    with small_server(small_model, "--policy", "slo", *options, data_dir=tmp_path / "data") as offloaded:
        found, metrics = serve(offloaded)
    assert found == expected
    assert metrics["offload_interval"] == 1
    (record,) = (tmp_path / "cache" / "profiles").glob("*.offload.json")
    assert PerformanceRecord.load(record).num_layers == 4
    (packed,) = (tmp_path / "cache" / "packed").glob("*.layers")
    layer_bytes = (packed.stat().st_size - 4096) // 4
    num_transfers, rest = divmod(metrics["offload_transferred_bytes_total"], layer_bytes)
    assert rest == 0
    assert num_transfers >= 4 * 24
    assert metrics["offload_stall_seconds_total"] > 0.0


PROMPT = list(range(100, 160))
OPTIONS = ("--dtype", "float32", "--kv-gib", "0.05", "--threads", "2", "--policy", "priority")
RANKS = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1")


def tokens_of_one_process(model: Path) -> list[int]:
    config = EngineConfig(model_dir=str(model), dtype="float32", kv_gib=0.05, device="cpu", threads=1)
    engine = Engine(SchedulerConfig(), create_torch_executor(config), VirtualClock())
    request = make_request(max_tokens=16, prompt_token_ids=PROMPT, ignore_eos=True)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return request.output_token_ids


@pytest.mark.slow  # long; deaths of ranks, without HTTP: tests/parallel/test_engine.py
def test_a_server_on_two_processes_answers_as_one_and_survives_the_death_of_a_rank(
    small_model: Path, tmp_path: Path
) -> None:
    expected = tokens_of_one_process(small_model)
    options = (*OPTIONS, *RANKS, "--served-model-name", MODEL)
    with ending(launch(str(small_model), *options, data_dir=tmp_path)) as server:
        server.wait_ready()
        assert server.tokens(PROMPT, max_tokens=16) == expected

        ranks = children(server.engine_pid())
        os.kill(ranks[1], signal.SIGKILL)
        wait_ended(ranks)  # an idle engine notices it too
        server.logged("The process of rank 1 of 2 was killed by signal 9")
        wait_until(lambda: server.http.get("/health").status_code == 503, "the engine to be missed")
        server.wait_ready()
        assert server.tokens(PROMPT, max_tokens=16) == expected
        left = [server.engine_pid(), *children(server.engine_pid())]
    wait_ended(left)


# Lengths on both sides of blocks, of chunks of keys (128), and of rows that a kernel computes together.
WATCHED = [[(1009 * index + 31 * at) % 40000 + 100 for at in range(11 + 59 * index)] for index in range(3)]
NUM_TOKENS = 8
NUM_FLOODING = 4


def completed(server: RunningServer, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """A choice of one request. Its salt is its own, so that nothing is found in the prefix cache."""
    fields |= {"return_token_ids": True, "cache_salt": f"invariance {next(_salts)}"}
    choice: dict[str, Any] = server.complete(prompt, max_tokens=NUM_TOKENS, **fields)["choices"][0]
    return choice


@pytest.mark.parametrize("name", ["server", pytest.param("default_server", marks=pytest.mark.slow)])
def test_answers_beside_a_flood_are_those_alone(name: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(name)
    greedy, seeded = {"temperature": 0, "logprobs": 1}, {"temperature": 0.9, "seed": 5, "logprobs": 1}
    asked = [(prompt, fields) for prompt in WATCHED for fields in (greedy, seeded)]
    alone = [completed(server, prompt, **fields) for prompt, fields in asked]
    is_over = Event()

    def flood(index: int) -> None:
        for turn in itertools.count():
            if is_over.is_set():
                return
            length = 1 + (97 * index + 61 * turn) % 150
            completed(
                server, [(7 * index + 13 * turn + at) % 40000 for at in range(length)], service_tier="flex"
            )

    with ThreadPoolExecutor(NUM_FLOODING + 4) as pool:
        flooding = [pool.submit(flood, index) for index in range(NUM_FLOODING)]
        try:
            beside = list(pool.map(lambda each: completed(server, each[0], **each[1]), asked))
        finally:
            is_over.set()
        for each in flooding:
            each.result()
    assert beside == alone  # tokens, and the log probabilities to the last digit


BODY: dict[str, Any] = {"prompt": [5] * 40, "max_tokens": 40, "ignore_eos": True}


def quality(server: RunningServer) -> set[str]:
    names = ("coarse", "refined", "full")
    return {name for name in names if server.metric("backfill:cost_profile_info", quality=name)}


@pytest.mark.slow  # without HTTP: tests/engine/test_refinement.py
def test_a_coarse_profile_refuses_no_request_and_is_refined(small_model: Path, tmp_path: Path) -> None:
    good = CostProfile.load(Path(quick_profile(str(small_model), "--dtype", "float32", "--threads", "1")))
    coarse = replace(good, quality="coarse", cost=scaled(good.cost, 50.0, 50.0))
    named = tmp_path / "coarse.json"
    coarse.save(named)
    options = ("--profile", str(named), "--tpot-slo", "0.000001")
    with small_server(small_model, *options, data_dir=tmp_path) as server:
        assert quality(server) == {"coarse"}
        assert server.metric("backfill:cost_profile_error_ratio", quantile="0.95") == coarse.error.p95
        assert "error" not in server.logged("steps are predicted with a coarse cost profile")
        assert server.logged("`tpot_slo` 1e-06: one request alone needs")
        answer = server.http.post("/v1/completions", json={**BODY, "slo": {"ttft": 1e-6}})
        assert answer.status_code == 200, answer.text
        assert answer.json()["metrics"]["ttft_slo_met"] is False
        wait_until(lambda: quality(server) == {"refined"}, "the profile to be refined")
        assert server.metric("backfill:cost_profile_error_ratio", quantile="0.5") > 0
        text = server.http.get("/metrics").text
        assert 'inter_token_latency_seconds_bucket{class="online",engine="0",le="1e-06"' in text
    assert CostProfile.load(named) == coarse, "the user's file is not changed"
