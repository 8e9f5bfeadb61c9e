"""What runs on a GPU gives the CPU's tokens, with every mechanism that moves or interrupts work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backfill.core.block import pack_block_ref
from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.plan import AdmittedRequest, Compute, Resume, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from tests.builders import make_profile
from tests.execution.tiny import tiny_config
from tests.integrity import check_scheduler
from tests.models.tiny import CONFIGS, save_tiny_model

pytestmark = pytest.mark.gpu

ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE
# Prompts and outputs in tokens; the second half arrives while the first runs.
LENGTHS = ((40, 40), (90, 12), (3, 50), (61, 30), (17, 8), (100, 20), (1, 30), (33, 33))


def tokens_on(
    device: str, folder: Path, scheduler: SchedulerConfig, kv_blocks: int, **options: object
) -> dict[RequestId, list[int]]:
    """The tokens of all requests, of which every second one is offline.

    Some are preempted where there are fewer than 40 blocks.
    """
    limited = replace(scheduler, max_num_batched_tokens=64, max_num_seqs=8)
    config = tiny_config(folder, kv_blocks, 2 * kv_blocks, device=device, scheduler=limited, **options)
    executor = create_torch_executor(config)
    profile = make_profile() if config.scheduler.needs_cost_model else None
    engine = Engine(config.scheduler, executor, WallClock(), profile)
    vocab_size = executor.info.vocab_size
    tokens: dict[RequestId, list[int]] = {}
    for index, (num_prompt, num_output) in enumerate(LENGTHS):
        if index >= len(LENGTHS) // 2:
            for _ in range(3):
                collect(engine, tokens)
        rng = np.random.default_rng(index)
        request = Request(
            request_id=RequestId(f"r{index}"),
            prompt_token_ids=rng.integers(3, vocab_size, num_prompt).tolist(),
            sampling=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
            service_class=OFFLINE if index % 2 == 0 else ONLINE,
        )
        tokens[request.request_id] = []
        assert engine.add(request) is None
    while engine.has_unfinished:
        collect(engine, tokens)
        check_scheduler(engine.scheduler)
    executor.close()
    assert [len(each) for each in tokens.values()] == [num for _, num in LENGTHS]
    num_preemptions = sum(each.num_preemptions for each in engine.scheduler.counters.values())
    assert num_preemptions > 0 or kv_blocks >= 40
    return tokens


def collect(engine: Engine, tokens: dict[RequestId, list[int]]) -> None:
    for output in engine.step():
        if output.token_id is not None:
            tokens[output.request_id].append(output.token_id)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_architecture(kind: str, tmp_path: Path) -> None:
    save_tiny_model(kind, tmp_path)
    of_cpu, of_gpu = (tokens_on(each, tmp_path, SchedulerConfig(), 200) for each in ("cpu", "cuda"))
    assert of_gpu == of_cpu


@pytest.mark.parametrize(
    "scheduler",
    [
        SchedulerConfig(policy="priority"),
        SchedulerConfig(policy="priority", checkpointing="swap", kv_restore="blocking"),
        SchedulerConfig(policy="slo"),
        SchedulerConfig(policy="slo", checkpointing="eager"),
        SchedulerConfig(policy="conserve"),
        SchedulerConfig(policy="bros"),
    ],
    ids=["recomputed", "swapped", "slo", "eager", "conserve", "bros"],
)
def test_under_pressure(scheduler: SchedulerConfig, tmp_path: Path) -> None:
    """A pool of 24 blocks holds a third of what the requests need."""
    save_tiny_model("llama", tmp_path)
    of_cpu = tokens_on("cpu", tmp_path, SchedulerConfig(policy="fcfs"), 200)
    assert tokens_on("cuda", tmp_path, scheduler, 24) == of_cpu


def tokens_of_suspended_decodes(device: str, folder: Path, num_stopped: int) -> list[list[int]]:
    """Five decodes. The last ones stop after a layer, and resume after a step of the others."""
    executor = create_torch_executor(tiny_config(folder, device=device, block_size=16))
    names = [RequestId(f"r{index}") for index in range(5)]
    stopped = names[len(names) - num_stopped :]
    tokens: dict[RequestId, list[int]] = {name: [] for name in names}
    admitted = tuple(
        AdmittedRequest(name, tuple(range(3 + at, 15 + at)), SamplingParams(max_tokens=9, temperature=0.0))
        for at, name in enumerate(names)
    )

    def slices(start: int, num: int, *, samples: bool = True) -> list[ScheduledSlice]:
        return [
            ScheduledSlice(
                name,
                start,
                num,
                (pack_block_ref(1 + 2 * at), pack_block_ref(2 + 2 * at)),
                samples,
                name in stopped,
            )
            for at, name in enumerate(names)
        ]

    def run(step: int, work: Compute | Resume, *, stops: bool = False) -> None:
        if stops:
            executor.request_stop(step)
        outcome = executor.run(StepPlan(step, work, admitted if step == 0 else ()))
        for each in outcome.sampled:
            tokens[each.request_id].append(each.token_id)

    points = Safepoints(1, suspends=True)
    run(0, Compute(tuple(slices(0, 12))))
    for number in range(6):
        decodes = slices(12 + number, 1)
        run(3 * number + 1, Compute(tuple(decodes), safepoints=points), stops=True)
        others = slices(12 + number, 1, samples=False)[: len(names) - num_stopped]
        run(3 * number + 2, Compute(tuple(others)))
        rest = tuple(each for each in decodes if each.stoppable)
        run(3 * number + 3, Resume(rest, executor.info.num_layers - 1, 0.0, points))
    executor.close()
    return [tokens[name] for name in names]


@pytest.mark.parametrize("num_stopped", [2, 5])
def test_suspended_decodes(num_stopped: int, tmp_path: Path) -> None:
    """What other steps compute in the memory of the graphs changes nothing of them."""
    save_tiny_model("llama", tmp_path)
    of_cpu, of_gpu = (tokens_of_suspended_decodes(each, tmp_path, num_stopped) for each in ("cpu", "cuda"))
    assert of_gpu == of_cpu
    assert list(map(len, of_gpu)) == [7] * 5


@pytest.mark.parametrize(
    "options", [{"offload_interval": 1}, {"offload_interval": 3}, {"num_micro_batches": 2}]
)
def test_ways_to_run_layers(options: dict[str, object], tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    of_cpu = tokens_on("cpu", tmp_path, SchedulerConfig(policy="fcfs"), 200)
    assert tokens_on("cuda", tmp_path, SchedulerConfig(policy="slo"), 40, **options) == of_cpu


def test_the_device_is_the_default_where_there_is_one(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    executor = create_torch_executor(EngineConfig(model_dir=str(tmp_path), kv_gib=1 / 64))
    assert (executor.info.device, torch.cuda.is_available()) == ("cuda", True)
    executor.close()
