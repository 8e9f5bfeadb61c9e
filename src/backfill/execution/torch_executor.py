"""The executor that runs a real model with torch, on CPU or CUDA."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from backfill.core.clock import WallClock
from backfill.core.plan import (
    Compute,
    Resume,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
    WeightTransfers,
)
from backfill.core.request import RequestId
from backfill.execution.batch import FlatBatch, build_batch
from backfill.execution.copies import BlockCopier
from backfill.execution.copy_groups import CompletedCopies
from backfill.execution.executor import ExecutorInfo
from backfill.execution.layer_pass import LayerPass, MicroBatch, sampled_rows
from backfill.execution.micro_batches import MicroBatchStreams, split_step
from backfill.execution.offloading import LayerStreamer
from backfill.execution.request_state import RequestState
from backfill.execution.reserved_memory import ReservedMemory
from backfill.execution.sampler import Sampler
from backfill.models.decoder import DecoderModel

logger = logging.getLogger(__name__)

# Bounds the wait for a copy in an idle step: an arrival is not seen before the wait ends.
_MAX_WAIT_S = 0.05


class Stop(NamedTuple):
    """Preemptible slices left the step at a safepoint.

    Attributes:
        ids: of their requests.
        at_s: when, on the executor's clock.
    """

    ids: Set[RequestId]
    layers_done: int
    at_s: float
    is_suspended: bool


class TorchExecutor:
    """See ``StoppableExecutor``. Owns the KV pool and the tokens of admitted requests.

    Args:
        kv_pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; may be uninitialised.
            As many blocks as there can ever be.
        streams: with two micro-batches, the prefills and the decodes of a step are computed side by side.
        copier: to and from the host pool; None without one.
        streamer: fetches the weights of offloaded layers; None if the model has all layers.
        pool_memory: of the KV pool, if the number of its blocks may change.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_pool: Tensor,
        info: ExecutorInfo,
        streams: MicroBatchStreams,
        copier: BlockCopier | None = None,
        streamer: LayerStreamer | None = None,
        pool_memory: ReservedMemory | None = None,
    ) -> None:
        self.info = info
        self._clock = WallClock()
        self._model = model
        self._kv_pool = kv_pool
        self._copier = copier
        self._streamer = streamer
        self._pool_memory = pool_memory
        self._num_blocks = info.num_blocks
        self._memory_error: Exception | None = None
        self._streams = streams
        self._sampler = Sampler(info.end_token_ids)
        self._states: dict[RequestId, RequestState] = {}
        self._suspended: LayerPass | None = None
        self._step_to_stop = -1  # written by another thread; a step compares it with its own number

    @property
    def streamer(self) -> LayerStreamer | None:
        return self._streamer

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write zeros to the first blocks of the pool, so that their pages are mapped."""
        self._kv_pool[:num_blocks].zero_()

    def request_stop(self, step: int) -> None:
        self._step_to_stop = max(self._step_to_stop, step)  # a late call for an earlier step must not undo it

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        self._prepare(plan)
        match plan.work:
            case WaitForCopies():
                if self._copier is not None:
                    self._copier.wait(_MAX_WAIT_S)
                return self._outcome(())
            case Compute(slices=()):
                return self._outcome(())
            case work:
                with self._streams.forked():
                    running, last = self._begun(work)
                    stop = self._run_layers(running, plan, last)
                # Completed copies are taken last: if the step failed after this, they would not be reported.
                outcome = self._outcome(self._sample(running, plan))
                return outcome if stop is None else _stopped_outcome(outcome, stop, plan)

    def _prepare(self, plan: StepPlan) -> None:
        """All that precedes the work of a step."""
        self._change_memory(plan)
        for request_id in plan.released:
            self._states.pop(request_id, None)
        if self._copier is not None:
            # Before anything that may fail: the copies of a failed step count as begun.
            self._copier.begin(plan.copies)
        else:
            assert not plan.copies, "there is no host pool to copy to and from"
        for admitted in plan.admitted:
            self._states[admitted.request_id] = RequestState(admitted)
        if not (isinstance(plan.work, Resume) or plan.work.keeps_suspended):
            self._drop_suspended()

    def _change_memory(self, plan: StepPlan) -> None:
        """Divide the memory, change the interval and move blocks. If that fails, no later step can run."""
        if self._memory_error is not None:
            raise RuntimeError("device memory could not be divided anew") from self._memory_error
        try:
            if plan.memory is not None:
                self._resize_pool(plan.memory.num_blocks)
            if self._streamer is not None:
                num_buffers = None if plan.memory is None else plan.memory.num_layers
                self._streamer.change(plan.offload_interval, num_buffers)
            if plan.memory is not None:
                logger.info(
                    "device memory: %d KV blocks, %d layers of weights",
                    plan.memory.num_blocks,
                    plan.memory.num_layers,
                )
            for source, target in plan.moves:
                self._kv_pool[target].copy_(self._kv_pool[source])
        except Exception as error:  # the control plane counts all of it as done
            self._memory_error = error
            raise

    def _resize_pool(self, num_blocks: int) -> None:
        assert self._pool_memory is not None, "the KV pool has a fixed size"
        block_bytes = self.info.block_bytes
        if num_blocks < self._num_blocks:
            self._pool_memory.release(num_blocks * block_bytes, self._num_blocks * block_bytes)
        self._num_blocks = num_blocks

    def _outcome(self, sampled: tuple[SampledToken, ...]) -> StepOutcome:
        """Of a step without stopped slices, with the copies that have completed."""
        completed = CompletedCopies() if self._copier is None else self._copier.take_completed()
        return StepOutcome(
            sampled,
            completed_copies=completed.blocks,
            completed_slot_copies=completed.slots,
            weight_transfers=WeightTransfers() if self._streamer is None else self._streamer.take_transfers(),
        )

    def _run_layers(self, running: LayerPass, plan: StepPlan, last: int) -> Stop | None:
        """Run the pass to its end, its preemptible slices to layer ``last`` at most."""
        model, points, streams, streamer = self._model, plan.safepoints, self._streams, self._streamer
        first = running.layers_done
        stop: Stop | None = None
        while running.micro_batches and running.layers_done < model.num_layers:
            layer = running.layers_done
            if points is not None and stop is None and layer > first:
                at_safepoint = (layer - first) % points.layers_apart == 0
                if at_safepoint:
                    streams.wait_for_previous_group()
                if layer == last or (at_safepoint and self._step_to_stop == plan.step):
                    stop = self._take_out(running, suspends=points.suspends)
                    continue
            if streamer is not None:
                streamer.before(layer)
            for each in running.micro_batches:
                with streams.of(each.stream):
                    each.state = model.run_layer(layer, each.state, self._kv_pool, each.batch.attention)
            if streamer is not None:
                streamer.after(layer)
            running.layers_done += 1
        return stop

    def _take_out(self, running: LayerPass, *, suspends: bool) -> Stop:
        """Split the preemptible slices off the pass; keep them if the step suspends them."""
        at_s = self._clock.now_s()
        preemptible = {each.request_id for each in running.slices if each.preemptible}
        others = {each.request_id for each in running.slices if not each.preemptible}
        if suspends:
            self._suspend(self._only(preemptible, running))
        running.micro_batches = self._only(others, running).micro_batches
        return Stop(preemptible, running.layers_done, at_s, suspends)

    def _only(self, kept: Set[RequestId], of: LayerPass) -> LayerPass:
        return of.with_only(kept, self._batch_of, self._streams)

    def _suspend(self, taken: LayerPass) -> None:
        self._suspended = taken

    def _drop_suspended(self) -> None:
        self._suspended = None

    def _begun(self, work: Compute | Resume) -> tuple[LayerPass, int]:
        """A pass before its first layer, or the suspended pass, and the layer before which it ends."""
        if isinstance(work, Resume):
            running = self._resumed(work.slices)
            return running, running.layers_done + work.num_layers
        micro_batches = []
        for stream, slices in enumerate(split_step(work.slices, self._streams.num_micro_batches)):
            with self._streams.of(stream):
                batch = self._batch_of(slices)
                state = self._model.embed(batch.token_ids, batch.attention)
                micro_batches.append(MicroBatch(slices, batch, state, stream))
        return LayerPass(micro_batches, layers_done=0), self._model.num_layers

    def _resumed(self, slices: tuple[ScheduledSlice, ...]) -> LayerPass:
        """The suspended pass with the resumed slices only."""
        suspended, self._suspended = self._suspended, None
        assert suspended is not None, "nothing is suspended"
        resumed = {scheduled.request_id for scheduled in slices}
        assert resumed <= {scheduled.request_id for scheduled in suspended.slices}
        return self._only(resumed, suspended)

    def _sample(self, running: LayerPass, plan: StepPlan) -> tuple[SampledToken, ...]:
        if not any(scheduled.samples for scheduled in running.slices):
            self._streams.synchronize()  # nothing was read from the device, so it may still compute
            return ()
        logits = self._model.logits(*sampled_rows(running.micro_batches))
        assert logits is not None, "the model is whole"
        sampled = self._drawn(logits, running, plan)
        for token in sampled:
            self._states[token.request_id].append(token.token_id)
        return sampled

    def _drawn(self, logits: Tensor, running: LayerPass, plan: StepPlan) -> tuple[SampledToken, ...]:
        """A token for each row of ``logits``, in the plan's order."""
        sampling = [scheduled.request_id for scheduled in running.slices if scheduled.samples]
        drawn = self._sampler.sample(logits, [self._states[request_id] for request_id in sampling])
        tokens = {
            request_id: SampledToken(request_id, token_id, logprobs)
            for request_id, (token_id, logprobs) in zip(sampling, drawn, strict=True)
        }
        return tuple(tokens[each.request_id] for each in plan.slices if each.request_id in tokens)

    def _batch_of(self, slices: Sequence[ScheduledSlice]) -> FlatBatch:
        tokens = [
            self._states[scheduled.request_id].tokens(scheduled.start, scheduled.start + scheduled.num_tokens)
            for scheduled in slices
        ]
        return build_batch(slices, tokens, self.info.block_size, self._kv_pool.device)


def _stopped_outcome(outcome: StepOutcome, stop: Stop, plan: StepPlan) -> StepOutcome:
    ids = tuple(each.request_id for each in plan.slices if each.request_id in stop.ids)
    return replace(
        outcome,
        suspended=ids if stop.is_suspended else (),
        discarded=() if stop.is_suspended else ids,
        layers_done=stop.layers_done,
        stopped_at_s=stop.at_s,
    )
