"""Two micro-batches give the tokens of one, and use no memory of each other while both run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backfill.core.block import pack_block_ref
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    Work,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution import create
from backfill.execution.create import create_torch_executor
from backfill.execution.micro_batches import MicroBatchStreams, split_step
from backfill.execution.torch_executor import TorchExecutor
from tests.execution.tiny import model_fixture, tiny_config
from tests.kernels.reference import ReferenceKernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK_SIZE = 8
POINTS = Safepoints(layers_apart=1, suspends=True)
NAMES = ("decode", "offline-decode", "prompt", "offline-prompt")


model_dir = model_fixture("llama", "opt")


def create_executor(folder: Path, num_micro_batches: int, device: str = "cpu") -> TorchExecutor:
    return create_torch_executor(tiny_config(folder, device=device, num_micro_batches=num_micro_batches))


def scheduled(name: str, start: int, num_tokens: int, *, samples: bool = True) -> ScheduledSlice:
    """A slice of one of ``NAMES``, in blocks of its own."""
    first = 8 * NAMES.index(name)
    blocks = tuple(pack_block_ref(first + block) for block in range(-(-(start + num_tokens) // BLOCK_SIZE)))
    return ScheduledSlice(RequestId(name), start, num_tokens, blocks, samples, name.startswith("offline"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1), st.sampled_from([1, 2]))
def test_every_slice_is_in_one_micro_batch_of_its_kind(
    shapes: list[tuple[int, int]], num_micro_batches: int
) -> None:
    slices = [
        ScheduledSlice(RequestId(str(index)), start, count, (), samples=True)
        for index, (start, count) in enumerate(shapes)
    ]
    parts = split_step(slices, num_micro_batches)
    decodes = [each for each in slices if each.start > 0 and each.num_tokens == 1]
    prefills = [each for each in slices if each not in decodes]
    if num_micro_batches == 2 and prefills and decodes:
        assert [list(part) for part in parts] == [prefills, decodes]
    else:
        assert [list(part) for part in parts] == [slices]


@pytest.mark.parametrize("number", [0, 3])
def test_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"must be between 1 and 2, got {number}"):
        EngineConfig(num_micro_batches=number).validate()


class RecordedStreams(MicroBatchStreams):
    """Knows which stream is current. Fork and join are noted in ``events``."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 2)
        self.current = 0
        self.is_forked = False
        self.events: list[str] = []

    @contextmanager
    def forked(self) -> Iterator[None]:
        self.events.append("fork")
        self.is_forked = True
        try:
            with super().forked():
                yield
        finally:
            self.is_forked = False
            self.events.append("join")

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        assert self.is_forked
        before, self.current = self.current, micro_batch
        try:
            yield
        finally:
            self.current = before


class StreamCheck(TorchDispatchMode):
    """Fails when an operation between fork and join uses memory that was allocated on the other stream.

    What was there before, weights and KV pool, may be used on both.
    """

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams
        self._allocated_on: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # no storage gets the address of one that was freed
        self.num_checked = [0, 0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        current = self._streams.current
        if self._streams.is_forked:
            owners = {self._allocated_on.get(storage, current) for storage in used}
            assert owners <= {current}, f"{func} on stream {current} uses memory of stream {1 - current}"
            self.num_checked[current] += 1
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and storage_of(x) not in used:
                self._allocated_on[storage_of(x)] = current
                self._kept.append(x)
        return result


def storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def run_steps(executor: TorchExecutor) -> list[StepOutcome]:
    """Mixed steps: one is stopped, one runs while slices of both kinds are suspended; these resume twice."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    admitted = tuple(
        AdmittedRequest(RequestId(name), tuple(range(3 + index, 40 + index)), sampling)
        for index, name in enumerate(NAMES)
    )
    outcomes: list[StepOutcome] = []

    def run(work: Work, *, stops: bool = False, admits: bool = False) -> None:
        step = len(outcomes)
        if stops:
            executor.request_stop(step)
        outcomes.append(executor.run(StepPlan(step, work, admitted if admits else ())))

    run(Compute((scheduled("decode", 0, 37), scheduled("offline-decode", 0, 37))), admits=True)
    suspended = scheduled("offline-decode", 37, 1), scheduled("offline-prompt", 0, 20, samples=False)
    mixed = (
        suspended[1],
        scheduled("decode", 37, 1),
        scheduled("prompt", 0, 11, samples=False),
        suspended[0],
    )
    run(Compute(mixed, safepoints=POINTS), stops=True)
    run(Compute((scheduled("decode", 38, 1), scheduled("prompt", 11, 26))))
    run(Resume((suspended[1], suspended[0]), 1, 0.0, POINTS))
    run(Resume((suspended[1], suspended[0]), executor.info.num_layers - 2, 0.0, POINTS))
    run(Compute((scheduled("offline-prompt", 20, 17), *(scheduled(name, 39 - index, 1) for index, name in
                enumerate(("decode", "offline-decode", "prompt"))))))  # fmt: skip
    executor.run(StepPlan(len(outcomes), Compute(()), released=tuple(map(RequestId, NAMES))))
    return outcomes


def tokens_of(outcome: StepOutcome) -> list[tuple[RequestId, int]]:
    return [(each.request_id, each.token_id) for each in outcome.sampled]


@pytest.mark.parametrize("device", DEVICES)
def test_outcomes_are_those_of_one_micro_batch(model_dir: Path, device: str) -> None:
    """Also in their order, which is the plan's."""
    one, two = (run_steps(create_executor(model_dir, number, device)) for number in (1, 2))
    assert [tokens_of(outcome) for outcome in two] == [tokens_of(outcome) for outcome in one]
    assert [outcome.suspended for outcome in two] == [outcome.suspended for outcome in one]
    assert [outcome.layers_done for outcome in two] == [0, 1, 0, 2, 0, 0]
    assert two[1].suspended == ("offline-prompt", "offline-decode")
    assert [each for each, _ in tokens_of(two[5])] == [
        "offline-prompt",
        *("decode", "offline-decode", "prompt"),
    ]


def test_no_stream_uses_memory_of_the_other_between_fork_and_join(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These kernels are torch operations, all of which the check sees.
    monkeypatch.setattr(create, "create_kernels", lambda device: ReferenceKernels())
    executor = create_executor(model_dir, 2)
    streams = executor._streams = RecordedStreams()
    with StreamCheck(streams) as check:
        run_steps(executor)
    assert all(check.num_checked)
    assert streams.events == ["fork", "join"] * 6


class FakeCuda:
    """Streams and events in place of torch's, which notes what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.num_events = 0
        first = self.stream("first")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: self.stream("second"))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream.name))

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}")
        )

    def event(self) -> SimpleNamespace:
        number, self.num_events = self.num_events, self.num_events + 1
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"event {number} on {stream.name}"),
            synchronize=lambda: self.log.append(f"host waits for event {number}"),
        )


FORK, JOIN = "second waits for first", "first waits for second"


def test_the_second_stream_is_forked_from_the_current_one_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    streams = MicroBatchStreams(torch.device("cuda", 0), 2)
    with streams.forked():
        assert cuda.log == [FORK]
        with streams.of(0) as first, streams.of(1) as second:
            assert (first, second) == (None, "second")
    assert cuda.log == [FORK, JOIN]
    with pytest.raises(ZeroDivisionError), streams.forked():
        _ = 1 / 0
    assert cuda.log == [FORK, JOIN] * 2


@pytest.mark.parametrize(("number", "names"), [(1, ["first"]), (2, ["first", "second"])])
def test_the_host_waits_for_the_group_before_on_each_stream(
    monkeypatch: pytest.MonkeyPatch, number: int, names: list[str]
) -> None:
    cuda = FakeCuda(monkeypatch)
    streams = MicroBatchStreams(torch.device("cuda", 0), number)
    for first_event in (0, 2 * number):  # nothing is left over from the pass before
        with streams.forked():
            cuda.log.clear()
            streams.wait_for_previous_group()
            streams.wait_for_previous_group()
            numbers = range(first_event, first_event + number)
            assert cuda.log == [
                *(f"event {each} on {name}" for each, name in zip(numbers, names, strict=True)),
                *(f"host waits for event {each}" for each in numbers),
                *(f"event {each + number} on {name}" for each, name in zip(numbers, names, strict=True)),
            ]
