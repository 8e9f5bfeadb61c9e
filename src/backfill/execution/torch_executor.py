"""The executor that runs a real model with torch, on CPU or CUDA."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

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
from backfill.execution.micro_batches import MicroBatchStreams, split_step
from backfill.execution.offloading import LayerStreamer
from backfill.execution.request_state import RequestState
from backfill.execution.reserved_memory import ReservedMemory
from backfill.execution.sampler import Sampler
from backfill.models.decoder import DecoderModel, HiddenState

logger = logging.getLogger(__name__)

# Bounds the wait for a copy in an idle step: an arrival is not seen before the wait ends.
_MAX_WAIT_S = 0.05


@dataclass(slots=True)
class _MicroBatch:
    """Slices that are computed together, at least one, and their state between two layers.

    Its tensors are allocated, used and freed on its stream, see ``MicroBatchStreams``.
    """

    slices: tuple[ScheduledSlice, ...]
    batch: FlatBatch
    state: HiddenState
    stream: int


@dataclass(slots=True)
class _Pass:
    """A forward pass between two layers; all its micro-batches have passed the same layers."""

    micro_batches: list[_MicroBatch]
    layers_done: int

    @property
    def slices(self) -> list[ScheduledSlice]:
        return [scheduled for each in self.micro_batches for scheduled in each.slices]


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
        self._suspended: _Pass | None = None
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
        self._change_memory(plan)
        for request_id in plan.released:
            self._states.pop(request_id, None)
        work, copies = plan.work, plan.copies
        if self._copier is not None:
            # Before anything that may fail: the copies of a failed step count as begun.
            self._copier.begin(copies)
        else:
            assert not copies, "there is no host pool to copy to and from"
        for admitted in plan.admitted:
            self._states[admitted.request_id] = RequestState(admitted)
        if not (isinstance(work, Resume) or work.keeps_suspended):
            self._suspended = None
        match work:
            case WaitForCopies():
                if self._copier is not None:
                    self._copier.wait(_MAX_WAIT_S)
                return self._outcome(())
            case Compute(slices=()):
                return self._outcome(())
        with self._streams.forked():
            running, last = self._begun(work)
            stopped, stopped_at_s = self._run_layers(running, plan, last)
        # Completed copies are taken last: if the step failed after this, they would not be reported.
        outcome = self._outcome(self._sample(running, plan))
        if stopped is None:
            return outcome
        stopped_ids = {scheduled.request_id for scheduled in stopped.slices}
        ids = tuple(each.request_id for each in plan.slices if each.request_id in stopped_ids)
        is_suspended = stopped is self._suspended
        return replace(
            outcome,
            suspended=ids if is_suspended else (),
            discarded=() if is_suspended else ids,
            layers_done=stopped.layers_done,
            stopped_at_s=stopped_at_s,
        )

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

    def _run_layers(self, running: _Pass, plan: StepPlan, last: int) -> tuple[_Pass | None, float | None]:
        """Run the pass to its end, its preemptible slices to layer ``last`` at most.

        Returns: the slices that were stopped, as a pass, and when.
        """
        model, points, streams, streamer = self._model, plan.safepoints, self._streams, self._streamer
        first = running.layers_done
        stopped: _Pass | None = None
        stopped_at_s: float | None = None
        while running.micro_batches and running.layers_done < model.num_layers:
            layer = running.layers_done
            if points is not None and stopped is None and layer > first:
                at_safepoint = (layer - first) % points.layers_apart == 0
                if at_safepoint:
                    streams.wait_for_previous_group()
                if layer == last or (at_safepoint and self._step_to_stop == plan.step):
                    stopped_at_s = self._clock.now_s()
                    stopped = self._take_out(running, suspends=points.suspends)
                    continue
            if streamer is not None:
                streamer.before(layer)
            for each in running.micro_batches:
                with streams.of(each.stream):
                    each.state = model.run_layer(layer, each.state, self._kv_pool, each.batch.attention)
            if streamer is not None:
                streamer.after(layer)
            running.layers_done += 1
        return stopped, stopped_at_s

    def _take_out(self, running: _Pass, *, suspends: bool) -> _Pass:
        """Split the preemptible slices off the pass and return them; keep them if the step suspends them."""
        preemptible = {each.request_id for each in running.slices if each.preemptible}
        others = {each.request_id for each in running.slices if not each.preemptible}
        taken = _Pass(self._with_only(preemptible, running.micro_batches), running.layers_done)
        running.micro_batches = self._with_only(others, running.micro_batches)
        self._suspended = taken if suspends else None
        return taken

    def _begun(self, work: Compute | Resume) -> tuple[_Pass, int]:
        """A pass before its first layer, or the suspended pass, and the layer before which it ends."""
        if isinstance(work, Resume):
            running = self._resumed(work.slices)
            return running, running.layers_done + work.num_layers
        micro_batches = []
        for stream, slices in enumerate(split_step(work.slices, self._streams.num_micro_batches)):
            with self._streams.of(stream):
                batch = self._batch_of(slices)
                state = self._model.embed(batch.token_ids, batch.attention)
                micro_batches.append(_MicroBatch(slices, batch, state, stream))
        return _Pass(micro_batches, layers_done=0), self._model.num_layers

    def _resumed(self, slices: tuple[ScheduledSlice, ...]) -> _Pass:
        """The suspended pass with the resumed slices only."""
        suspended, self._suspended = self._suspended, None
        assert suspended is not None, "nothing is suspended"
        resumed = {scheduled.request_id for scheduled in slices}
        assert resumed <= {scheduled.request_id for scheduled in suspended.slices}
        return _Pass(self._with_only(resumed, suspended.micro_batches), suspended.layers_done)

    def _with_only(self, kept: Set[RequestId], micro_batches: Sequence[_MicroBatch]) -> list[_MicroBatch]:
        """The micro-batches with the slices of these requests only, without empty ones.

        A micro-batch with all its slices is itself, one with some of them has a copy of their rows.
        """
        found: list[_MicroBatch] = []
        for each in micro_batches:
            keep = [scheduled.request_id in kept for scheduled in each.slices]
            if all(keep):
                found.append(each)
            elif any(keep):
                with self._streams.of(each.stream):
                    found.append(self._split(each, keep))
        return found

    def _split(self, whole: _MicroBatch, keep: Sequence[bool]) -> _MicroBatch:
        """A micro-batch of the kept slices only, with a copy of their rows."""
        slices = tuple(scheduled for scheduled, kept in zip(whole.slices, keep, strict=True) if kept)
        counts = torch.tensor([scheduled.num_tokens for scheduled in whole.slices])
        rows = torch.repeat_interleave(torch.tensor(keep), counts).nonzero().squeeze(1)
        rows = rows.to(whole.state.residual.device)
        residual, delta = whole.state
        state = HiddenState(residual[rows], None if delta is None else delta[rows])
        return _MicroBatch(slices, self._batch_of(slices), state, whole.stream)

    def _sample(self, running: _Pass, plan: StepPlan) -> tuple[SampledToken, ...]:
        sampling = [scheduled.request_id for scheduled in running.slices if scheduled.samples]
        if not sampling:
            self._streams.synchronize()  # nothing was read from the device, so it may still compute
            return ()
        logits = self._model.logits(*_sampled_rows(running.micro_batches))
        states = [self._states[request_id] for request_id in sampling]
        sampled = self._sampler.sample(logits, states)
        for state, (token_id, _) in zip(states, sampled, strict=True):
            state.append(token_id)
        tokens = {
            request_id: SampledToken(request_id, token_id, logprobs)
            for request_id, (token_id, logprobs) in zip(sampling, sampled, strict=True)
        }
        return tuple(tokens[each.request_id] for each in plan.slices if each.request_id in tokens)

    def _batch_of(self, slices: Sequence[ScheduledSlice]) -> FlatBatch:
        tokens = [
            self._states[scheduled.request_id].tokens(scheduled.start, scheduled.start + scheduled.num_tokens)
            for scheduled in slices
        ]
        return build_batch(slices, tokens, self.info.block_size, self._kv_pool.device)


def _sampled_rows(micro_batches: Sequence[_MicroBatch]) -> tuple[HiddenState, Tensor]:
    """Hidden states, and the indices of their rows that are sampled, one micro-batch after another.

    At least one is: the output projection reads its weights once for all.
    """
    sampling = [each for each in micro_batches if any(scheduled.samples for scheduled in each.slices)]
    if len(sampling) == 1:
        return sampling[0].state, sampling[0].batch.sampled_rows
    rows = [each.batch.sampled_rows for each in sampling]
    residual = torch.cat([each.state.residual[index] for each, index in zip(sampling, rows, strict=True)])
    deltas = [
        each.state.delta[index]
        for each, index in zip(sampling, rows, strict=True)
        if each.state.delta is not None
    ]
    state = HiddenState(residual, torch.cat(deltas) if deltas else None)
    return state, torch.arange(len(residual), device=residual.device)
