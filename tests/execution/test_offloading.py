"""A model with offloaded layers computes the same tokens, within the memory that was planned."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.block import BlockMove
from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.plan import Compute, DeviceMemory, StepPlan
from backfill.core.request import RequestId
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.offloading import LayerStreamer
from backfill.execution.torch_executor import TorchExecutor
from backfill.execution.weight_links import ThreadLink
from tests.builders import make_request
from tests.execution.tiny import cache_fixture, model_fixture, tiny_config
from tests.models.tiny import save_tiny_model
from tests.shared import examples

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_LAYERS = 12
RESIDENCY = 4  # memory for 11 layers, which intervals 1 to 4 need at most
MODELS = [  # kind, dtype, hidden size
    ("llama", "float32", 48),
    ("qwen3", "bfloat16", 96),
    ("opt", "bfloat16", 96),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            *(
                (kind, "float32", 48)
                for kind in ("llama-biased", "mistral", "qwen2", "qwen3", "opt", "opt-350m")
            ),
            ("llama-biased", "bfloat16", 48),
        )
    ),
]


cache = cache_fixture("module")
model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


def streamer_of(executor: TorchExecutor) -> LayerStreamer:
    assert executor.streamer is not None
    return executor.streamer


def generate(executor: TorchExecutor, intervals: Sequence[int] = ()) -> list[list[int]]:
    """Tokens of four prompts, computed in chunks; a step takes the next of ``intervals``."""
    config = SchedulerConfig(max_prefill_chunk_tokens=24, prefix_caching=False)
    engine = Engine(config, executor, VirtualClock())
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 190, (length,), generator=generator).tolist() for length in (1, 9, 30, 61)]
    # Drawn, not greedy: any other logits are likely to show.
    sampling: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.5}
    requests = [
        make_request(prompt_token_ids=prompt, seed=index, **sampling) for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    step = 0
    while engine.has_unfinished:
        if intervals:
            streamer_of(executor).change(intervals[step % len(intervals)])
        engine.step()
        step += 1
    executor.run(StepPlan(step, Compute(()), released=tuple(each.request_id for each in requests)))
    return [request.output_token_ids for request in requests]


@functools.cache
def pair(
    folder: Path, kind: str, dtype: str, hidden: int, device: str
) -> tuple[TorchExecutor, list[list[int]]]:
    """A model with offloaded layers, and the tokens of the same model with all layers."""
    changed = {"hidden_size": hidden, **({"word_embed_proj_dim": hidden} if kind == "opt" else {})}
    changed = {} if hidden == 48 else changed
    save_tiny_model(kind, folder, num_hidden_layers=NUM_LAYERS, **changed)
    common: dict[str, Any] = {"dtype": dtype, "device": device}
    expected = generate(create_torch_executor(tiny_config(folder, **common)))
    assert len({tuple(tokens) for tokens in expected}) > 1
    return create_torch_executor(tiny_config(folder, offload_interval=RESIDENCY, **common)), expected


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(*key: object) -> Path:
        made: Path = tmp_path_factory.mktemp("model")
        return made

    yield folder
    pair.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype", "hidden"), MODELS)
@settings(max_examples=examples(6))
@given(intervals=st.lists(st.integers(1, RESIDENCY), min_size=1, max_size=8))
def test_tokens_are_the_same_while_the_interval_changes(
    folders: Any, kind: str, dtype: str, hidden: int, device: str, intervals: list[int]
) -> None:
    folder = folders(kind, dtype, hidden, device)
    executor, expected = pair(folder, kind, dtype, hidden, device)
    assert generate(executor, intervals) == expected


@pytest.mark.parametrize("interval", [1, 3, 12])
def test_tokens_are_the_same_at_every_interval(model_dir: Path, interval: int) -> None:
    expected = generate(create_torch_executor(tiny_config(model_dir)))
    executor = create_torch_executor(tiny_config(model_dir, offload_interval=interval))
    assert generate(executor) == expected
    assert len(executor._model.layers) <= len(streamer_of(executor)._placed)


def test_each_step_transfers_the_offloaded_layers_once(model_dir: Path) -> None:
    executor = create_torch_executor(tiny_config(model_dir, offload_interval=3))
    layer_bytes = streamer_of(executor)._placed[0].buffer_bytes
    link = streamer_of(executor)._link
    assert isinstance(link, ThreadLink)
    read, before_s = link._read, link.stall_s  # of the warm-up

    def slowly(layer: int, buffer: torch.Tensor) -> None:
        time.sleep(0.01)
        read(layer, buffer)

    link._read = slowly
    engine = Engine(SchedulerConfig(), executor, VirtualClock())
    engine.add(make_request(prompt_token_ids=[5, 6, 7], max_tokens=5, ignore_eos=True))
    stalled_s = 0.0
    assert engine.stats().offload_interval == 3
    for step in range(1, 6):
        engine.step()
        stats = engine.stats()
        assert stats.num_transferred_weight_bytes == step * 4 * layer_bytes
        assert stats.offload_interval == 3
        assert stats.weight_stall_s > stalled_s
        stalled_s = stats.weight_stall_s
    assert stalled_s == pytest.approx(link.stall_s - before_s)


def test_transfers_of_a_failed_step_are_reported_by_the_next(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = create_torch_executor(tiny_config(model_dir, offload_interval=1))
    layer_bytes = streamer_of(executor)._placed[0].buffer_bytes
    engine = Engine(SchedulerConfig(), executor, VirtualClock())
    request = make_request(prompt_token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True)
    engine.add(request)
    run_layers = executor._model.run_layers

    def failing(layers: range, *arguments: Any) -> Any:
        if 5 in layers:
            raise RuntimeError("broken")
        return run_layers(layers, *arguments)

    monkeypatch.setattr(executor._model, "run_layers", failing)
    engine.step()
    monkeypatch.undo()
    while engine.has_unfinished:
        engine.step()
    # Layers 0 to 5, then whole passes; layer 5 is still there, and 6 was fetched, but the pass begins again.
    num_transfers = engine.stats().num_transferred_weight_bytes // layer_bytes
    assert 4 * NUM_LAYERS + 6 - 2 <= num_transfers <= 4 * NUM_LAYERS + 6
    undisturbed = create_torch_executor(tiny_config(model_dir))
    again = make_request(prompt_token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True)
    other = Engine(SchedulerConfig(), undisturbed, VirtualClock())
    other.add(again)
    while other.has_unfinished:
        other.step()
    assert request.output_token_ids == again.output_token_ids


def test_a_read_that_fails_fails_every_step(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = create_torch_executor(tiny_config(model_dir, offload_interval=1))

    def unreadable(*arguments: object) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr("backfill.models.packed.os.preadv", unreadable)
    engine = Engine(SchedulerConfig(), executor, VirtualClock())
    for number in (1, 2):
        engine.add(make_request(prompt_token_ids=[5, 6, 7], max_tokens=2, request_id=f"request-{number}"))
        while engine.has_unfinished:
            engine.step()
        assert engine.num_failed_steps_in_a_row >= number


class GrowingTimes(deque[float]):
    """As if the link's thread appended to it whenever it is iterated over."""

    def __iter__(self) -> Iterator[float]:
        raise RuntimeError("deque mutated during iteration")

    __reversed__ = __iter__


def test_transfers_that_end_while_they_are_reported_fail_no_step(model_dir: Path) -> None:
    streamer = streamer_of(create_torch_executor(tiny_config(model_dir, offload_interval=1)))
    streamer._link.times_s = GrowingTimes([9.0] * 40 + [1.0] * 10 + [2.0] * 21)
    assert streamer.take_transfers().transfer_s == 2.0


def test_an_interval_may_be_text_as_on_the_command_line() -> None:
    assert EngineConfig(offload_interval="4").offload_every == 4
    assert EngineConfig(offload_interval=4).offload_every == 4
    assert EngineConfig().offload_every is None


def test_an_interval_that_saves_nothing_is_said_to(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_torch_executor(tiny_config(model_dir, offload_interval=6))
    assert "offload_interval 6 saves no memory: 2 layers are offloaded" in caplog.text


def resizable(model_dir: Path, **changes: Any) -> TorchExecutor:
    scheduler = SchedulerConfig(policy="slo", max_num_batched_tokens=256)
    return create_torch_executor(
        tiny_config(
            model_dir, offload_interval=RESIDENCY, min_offload_interval=1, scheduler=scheduler, **changes
        )
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_divides_device_memory_anew(model_dir: Path, device: str) -> None:
    executor = resizable(model_dir, device=device)
    info, streamer = executor.info, streamer_of(executor)
    few, most = info.residencies[0], info.residencies[-1]
    assert (few.interval, most.interval) == (1, RESIDENCY)
    assert few.num_blocks == info.num_blocks + 9 * streamer.layer_bytes // info.block_bytes
    expected = generate(executor)
    executor.run(StepPlan(0, Compute(()), offload_interval=1, memory=DeviceMemory(few.num_blocks, 1)))
    assert (streamer.num_buffers, len(executor._model.layers)) == (2, 2)
    executor._kv_pool[: few.num_blocks].fill_(1.0)  # also what lies beyond the pool at first
    assert generate(executor) == expected
    executor.run(
        StepPlan(1, Compute(()), offload_interval=4, memory=DeviceMemory(most.num_blocks, RESIDENCY)),
    )
    assert generate(executor) == expected
    assert streamer.num_buffers == 11


def test_moves_come_before_what_reads_the_blocks(model_dir: Path) -> None:
    executor = resizable(model_dir)
    pool = executor._kv_pool
    pool[5], pool[6] = 5.0, 6.0
    executor.run(StepPlan(0, Compute(()), moves=(BlockMove(5, 1), BlockMove(6, 5))))
    assert pool[1].eq(5.0).all()
    assert pool[5].eq(6.0).all()


def test_after_memory_could_not_be_divided_no_step_runs(model_dir: Path) -> None:
    executor = resizable(model_dir)
    with pytest.raises(ValueError, match="interval 12 needs"):
        executor.run(StepPlan(0, Compute(()), offload_interval=12))
    with pytest.raises(RuntimeError, match="no step can run"):
        executor.run(StepPlan(1, Compute(())))


def test_after_suspended_slices_could_not_be_dropped_no_step_runs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of them might be resumed in place of one that was computed again."""
    executor = resizable(model_dir)

    def fails(self: object, dropped: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(executor), "_drop_suspended", fails)
    with pytest.raises(MemoryError):
        executor.run(StepPlan(0, Compute(()), dropped=(RequestId("r"),)))
    with pytest.raises(RuntimeError, match="no step can run"):
        executor.run(StepPlan(1, Compute(())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"offload_interval": interval}, "`offload_interval` must be none, auto or a whole number of at")
            for interval in (0, -1, "0", "Auto", "4.5", "")
        ),
        *(
            ({"device_memory": gib}, "`device_memory` must be .*above 0")
            for gib in (0.0, -1.0, float("nan"), float("inf"))
        ),
        *(
            (
                {"offload_interval": interval, "min_offload_interval": least},
                f"`min_offload_interval` {least} needs auto or a larger number as `offload_interval`, got",
            )
            for interval, least in (("none", 2), (4, 4))
        ),
        *(
            ({"offload_interval": interval, "min_offload_interval": 0}, "must be at least 1, got 0")
            for interval in (4, "auto")
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options).validate()
