"""Times a rank's layers and the transfers of their weights, and reports them with the outcomes of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from backfill.core.plan import Compute, RankTiming, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.execution.torch_executor import TorchExecutor

# Asks a timed rank to transfer all layers that it holds again, with nothing beside them. An engine makes no
# such plan, since its steps count from 0.
TRANSFER_AGAIN = StepPlan(step=-1, work=Compute(slices=()))


class TimedExecutor:
    """One rank, all of whose outcomes have ``WeightTransfers.timings``. It also takes ``TRANSFER_AGAIN``.

    Args:
        executor: has offloaded layers, and belongs to this from now on.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        assert executor.streamer is not None, "no layer is offloaded"
        self.info = executor.info
        self._executor = executor
        self._streamer = executor.streamer
        self._layers = _CudaLayers() if self.info.device == "cuda" else _HostLayers()
        self._streamer.observer = self._layers

    def run(self, plan: StepPlan, sampled: Sequence[tuple[RequestId, int]] | None = None) -> StepOutcome:
        """See ``TorchExecutor.run``."""
        if plan == TRANSFER_AGAIN:
            self._streamer.transfer_again()
        self._layers.forget()
        outcome = self._executor.run(plan, sampled)
        layers_s, waits_s = self._layers.take_s()
        transfers_s = tuple(self._streamer.take_transfer_times_s())
        timing = RankTiming(layers_s, waits_s, transfers_s, self._streamer.layer_bytes)
        return replace(outcome, weight_transfers=outcome.weight_transfers._replace(timings=(timing,)))

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write to the first blocks of the pool, so that their pages are mapped."""
        self._executor.fill_kv_pool(num_blocks)

    def close(self) -> None:
        """No other call may follow."""
        self._executor.close()


_Times = tuple[tuple[float, ...], tuple[float, ...]]


class _HostLayers:
    """Times layers that are computed when their call returns. See ``LayerObserver``."""

    def __init__(self) -> None:
        self._reached_s = self._began_s = 0.0
        self._layers_s: list[float] = []
        self._waits_s: list[float] = []

    def reach(self) -> None:
        self._reached_s = time.perf_counter()

    def begin(self) -> None:
        self._began_s = time.perf_counter()
        self._waits_s.append(self._began_s - self._reached_s)

    def end(self) -> None:
        self._layers_s.append(time.perf_counter() - self._began_s)

    def forget(self) -> None:
        """All layers until now: a step that failed inside one has left a part of it."""
        self._layers_s, self._waits_s = [], []

    def take_s(self) -> _Times:
        """Seconds of each layer since the last call, and before each waiting for its weights."""
        taken = tuple(self._layers_s), tuple(self._waits_s)
        self.forget()
        return taken


class _CudaLayers:
    """Times layers on the current CUDA stream. See ``LayerObserver``."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def reach(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._events.append(event)

    begin = end = reach

    def forget(self) -> None:
        """See ``_HostLayers``."""
        self._events = []

    def take_s(self) -> _Times:
        """See ``_HostLayers``; the device must have computed them."""
        taken, self._events = self._events, []
        layers_s, waits_s = [], []
        for reached, began, ended in zip(taken[::3], taken[1::3], taken[2::3], strict=True):
            waits_s.append(reached.elapsed_time(began) / 1000.0)
            layers_s.append(began.elapsed_time(ended) / 1000.0)
        return tuple(layers_s), tuple(waits_s)
