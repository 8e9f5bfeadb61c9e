"""The executor of one rank, which holds a shard of the model: a stage's layers, a part of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from backfill.core.plan import (
    Compute,
    Resume,
    Safepoints,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
)
from backfill.core.request import RequestId
from backfill.execution.collectives import PeerFailed, RankLinks, StageHeader
from backfill.execution.copies import BlockCopier
from backfill.execution.executor import ExecutorInfo
from backfill.execution.layer_pass import LayerPass, MicroBatch, sampled_rows
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.torch_executor import Stop, TorchExecutor
from backfill.models.decoder import DecoderModel, HiddenState


@dataclass(slots=True)
class _Exchanged:
    """What a step has exchanged with other stages.

    Attributes:
        number: counts the steps that the rank has begun; the same on all ranks.
        step: of the plan.
        last_layer, stopped_layers, stopped_at_s: see ``StageHeader``.
    """

    number: int
    step: int
    last_layer: int
    stopped_layers: int | None = None
    stopped_at_s: float = 0.0
    is_received: bool = False
    is_sent: bool = False


class ShardExecutor(TorchExecutor):
    """Runs the same plans, in the same order, as the executors of all other ranks.

    A step stops where all ranks of a stage agree that it does: between any two layers if there is one stage,
    else at the end of a stage, which keeps the slices that it suspends. Each stage sends one message for each
    step that computes, also without rows or after a failure, so that the next one never waits in vain.

    Args:
        model: the rank's shard of it, whose group is that of ``links``.
        kv_pool: the rank's part of each block.
        is_stop_asked: whether a step of this number is to stop; asked on tensor rank 0.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_pool: Tensor,
        info: ExecutorInfo,
        links: RankLinks,
        is_stop_asked: Callable[[int], bool],
        copier: BlockCopier | None = None,
    ) -> None:
        super().__init__(model, kv_pool, info, MicroBatchStreams(kv_pool.device, 1), copier)
        self._shard = model.shard
        self._links = links
        self._is_stop_asked = is_stop_asked
        self._suspended_in: dict[int, LayerPass] = {}  # by the plan's step; several may be in flight
        self._exchanged = _Exchanged(0, 0, model.num_layers)

    def run(self, plan: StepPlan, sampled: Sequence[tuple[RequestId, int]] = ()) -> StepOutcome:
        """Run the rank's part of a plan.

        Args:
            sampled: requests and tokens of steps that were collected since the plan before; no rank knows
                them yet.

        Returns: on tensor rank 0 of the last stage the step's outcome. The last stage knows all stops, others
            their own and earlier ones. Each rank reports its own copies.
        Raises: PeerFailed if another rank failed in the step; else as ``Executor.run``.
        """
        self._exchanged = _Exchanged(self._exchanged.number + 1, plan.step, self._shard.num_layers)
        self._links.group.begin_step()
        try:
            for request_id, token_id in sampled:
                state = self._states.get(request_id)
                if state is not None:  # else it was released
                    state.append(token_id)
            return super().run(plan)
        except BaseException:
            self._links.group.fail_step()
            if plan.slices:
                self._exchange_failure()
            raise

    def close(self) -> None:
        """Leave the group and the links. No other call may follow."""
        self._links.close()
        if self._copier is not None:
            self._copier.close()

    def _exchange_failure(self) -> None:
        """Send and receive the messages of the step that were not exchanged when it failed."""
        exchanged, links = self._exchanged, self._links
        if links.following is not None and not exchanged.is_sent:
            with suppress(PeerFailed):
                links.following.send(StageHeader(exchanged.number, failed=True), None)
        if links.previous is not None and not exchanged.is_received:
            with suppress(PeerFailed):
                links.previous.receive()

    def _suspend(self, taken: LayerPass) -> None:
        self._suspended_in[self._exchanged.step] = taken

    def _drop_suspended(self) -> None:
        self._suspended_in.clear()

    def _begun(self, work: Compute | Resume) -> tuple[LayerPass, int]:
        exchanged, previous = self._exchanged, self._links.previous
        suspended = self._take_suspended(work) if isinstance(work, Resume) else None
        if previous is not None:
            header, state = previous.receive()
            exchanged.is_received = True
            if header.failed:
                raise PeerFailed("the stage before has failed in this step")
            assert header.number == exchanged.number, f"{header} in step {exchanged.number}"
            if suspended is None:
                return self._received(header, state, work.slices), exchanged.last_layer
        if suspended is not None:
            assert isinstance(work, Resume)
            exchanged.last_layer = suspended.layers_done + work.num_layers
            return suspended, exchanged.last_layer
        if isinstance(work, Resume):  # a later stage has suspended the slices
            assert self._links.following is not None, "nothing is suspended"
            return LayerPass([], self._shard.layers.start), exchanged.last_layer
        running, _ = super()._begun(work)
        return running, exchanged.last_layer

    def _take_suspended(self, work: Resume) -> LayerPass | None:
        """The resumed slices. None if this stage did not suspend them."""
        resumed = {scheduled.request_id for scheduled in work.slices}
        for step in sorted(self._suspended_in, reverse=True):
            if resumed <= {scheduled.request_id for scheduled in self._suspended_in[step].slices}:
                return self._only(resumed, self._suspended_in.pop(step))
        return None

    def _received(
        self, header: StageHeader, state: HiddenState | None, slices: tuple[ScheduledSlice, ...]
    ) -> LayerPass:
        """The pass that the stage before has sent, without the slices that were stopped."""
        exchanged = self._exchanged
        exchanged.last_layer = header.last_layer
        exchanged.stopped_layers, exchanged.stopped_at_s = header.stopped_layers, header.stopped_at_s
        if header.stopped_layers is not None:
            slices = tuple(each for each in slices if not each.preemptible)
        if state is None:
            return LayerPass([], self._shard.layers.start)
        micro_batch = MicroBatch(slices, self._batch_of(slices), state, stream=0)
        return LayerPass([micro_batch], self._shard.layers.start)

    def _run_layers(self, running: LayerPass, plan: StepPlan, last: int) -> Stop | None:
        """Run the stage's layers, and send the rest of the pass to the next stage."""
        model, group, points, layers = self._model, self._links.group, plan.safepoints, self._shard.layers
        first, stop = running.layers_done, self._earlier_stop(plan)
        asked = partial(self._is_stop_asked, plan.step)
        while running.micro_batches:
            layer = running.layers_done
            if points is not None and stop is None and first < layer < self._shard.num_layers:
                at_safepoint = self._is_safepoint(layer, first, points)
                if at_safepoint:
                    self._streams.wait_for_previous_group()
                if layer == last or (at_safepoint and group.stop_agreed):
                    stop = self._take_out(running, suspends=points.suspends)
                    continue
            if layer == layers.stop:
                break
            if points is not None:
                # Two layers: a group may know only what the one before the last has carried.
                precedes = any(self._is_safepoint(layer + ahead, first, points) for ahead in (1, 2))
                group.arm(asked if precedes and stop is None else None)
            for each in running.micro_batches:
                each.state = model.run_layer(layer, each.state, self._kv_pool, each.batch.attention)
            running.layers_done += 1
        if self._links.following is not None:
            self._send(running, stop)
        return stop

    def _is_safepoint(self, layer: int, first: int, points: Safepoints) -> bool:
        """Whether a pass that began before layer ``first`` may stop before ``layer``."""
        if len(self._shard.layers) < self._shard.num_layers:
            return layer == self._shard.layers.stop < self._shard.num_layers
        return (layer - first) % points.layers_apart == 0

    def _earlier_stop(self, plan: StepPlan) -> Stop | None:
        """Of an earlier stage in this step."""
        exchanged = self._exchanged
        if exchanged.stopped_layers is None:
            return None
        assert plan.safepoints is not None, "a step without safepoints was stopped"
        ids = {each.request_id for each in plan.slices if each.preemptible}
        return Stop(ids, exchanged.stopped_layers, exchanged.stopped_at_s, plan.safepoints.suspends)

    def _send(self, running: LayerPass, stop: Stop | None) -> None:
        exchanged, following = self._exchanged, self._links.following
        assert following is not None and len(running.micro_batches) <= 1
        state = running.micro_batches[0].state if running.micro_batches else None
        header = StageHeader(
            exchanged.number,
            exchanged.last_layer,
            None if stop is None else stop.layers_done,
            0.0 if stop is None else stop.at_s,
        )
        following.send(header, state)
        exchanged.is_sent = True

    def _sample(self, running: LayerPass, plan: StepPlan) -> tuple[SampledToken, ...]:
        """Tokens on tensor rank 0 of the last stage. All ranks get them with the next plan."""
        samples = self._shard.is_last and any(scheduled.samples for scheduled in running.slices)
        logits = self._model.logits(*sampled_rows(running.micro_batches)) if samples else None
        if logits is None:
            self._streams.synchronize()
            return ()
        return self._drawn(logits, running, plan)
