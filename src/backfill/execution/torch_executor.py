"""The executor that runs a real model with torch, on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backfill.core.block import BlockCopy
from backfill.core.clock import WallClock
from backfill.core.plan import (
    Compute,
    Resume,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import RequestId
from backfill.execution.batch import FlatBatch, build_batch
from backfill.execution.copies import BlockCopier
from backfill.execution.executor import ExecutorInfo
from backfill.execution.request_state import RequestState
from backfill.execution.sampler import Sampler
from backfill.models.decoder import DecoderModel, HiddenState

# Bounds the wait for a copy in an idle step: an arrival is not seen before the wait ends.
_MAX_WAIT_S = 0.05


@dataclass(slots=True)
class _Pass:
    """The state of a forward pass between two layers."""

    slices: tuple[ScheduledSlice, ...]
    batch: FlatBatch
    state: HiddenState
    layers_done: int


class TorchExecutor:
    """See ``StoppableExecutor``. Owns the KV pool and the tokens of admitted requests.

    Args:
        kv_pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; may be uninitialised.
        copier: to and from the host pool; None without one.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_pool: Tensor,
        info: ExecutorInfo,
        copier: BlockCopier | None = None,
    ) -> None:
        self.info = info
        self._clock = WallClock()
        self._model = model
        self._kv_pool = kv_pool
        self._copier = copier
        self._sampler = Sampler(info.end_token_ids)
        self._states: dict[RequestId, RequestState] = {}
        self._suspended: _Pass | None = None
        self._step_to_stop = -1  # written by another thread; a step compares it with its own number

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write zeros to the first blocks of the pool, so that their pages are mapped."""
        self._kv_pool[:num_blocks].zero_()

    def request_stop(self, step: int) -> None:
        self._step_to_stop = max(self._step_to_stop, step)  # a late call for an earlier step must not undo it

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        for request_id in plan.released:
            self._states.pop(request_id, None)
        work, copies = plan.work, plan.copies
        if self._copier is not None:
            # Before anything that may fail: the copies of a failed step count as begun.
            self._copier.begin(copies.checkpoint, copies.restore, copies.blocking)
        else:
            assert not (copies.checkpoint or copies.restore), "there is no host pool to copy to and from"
        for admitted in plan.admitted:
            self._states[admitted.request_id] = RequestState(admitted)
        if not (isinstance(work, Resume) or work.keeps_suspended):
            self._suspended = None
        match work:
            case WaitForCopies():
                if self._copier is not None:
                    self._copier.wait(_MAX_WAIT_S)
                return StepOutcome(sampled=(), completed_copies=self._take_completed_copies())
            case Compute(slices=()):
                return StepOutcome(sampled=(), completed_copies=self._take_completed_copies())
            case Compute(slices=slices):
                running, last = self._embedded(slices), self._model.num_layers
            case Resume(slices=slices, num_layers=num_layers):
                running = self._resumed(slices)
                last = running.layers_done + num_layers
        stopped, stopped_at_s = self._run_layers(running, plan, last)
        sampled = self._sample(running)
        # Last: if the step failed after this, completed copies would not be reported.
        completed = self._take_completed_copies()
        if stopped is None:
            return StepOutcome(sampled, completed_copies=completed)
        ids = tuple(scheduled.request_id for scheduled in stopped.slices)
        is_suspended = stopped is self._suspended
        return StepOutcome(
            sampled,
            suspended=ids if is_suspended else (),
            discarded=() if is_suspended else ids,
            layers_done=stopped.layers_done,
            stopped_at_s=stopped_at_s,
            completed_copies=completed,
        )

    def _take_completed_copies(self) -> tuple[BlockCopy, ...]:
        return () if self._copier is None else self._copier.take_completed()

    def _run_layers(self, running: _Pass, plan: StepPlan, last: int) -> tuple[_Pass | None, float | None]:
        """Run the pass to its end, its preemptible slices to layer ``last`` at most.

        Returns: the slices that were stopped, as a pass, and when.
        """
        model, points = self._model, plan.safepoints
        first = running.layers_done
        stopped: _Pass | None = None
        stopped_at_s: float | None = None
        queued: torch.cuda.Event | None = None
        while running.slices and running.layers_done < model.num_layers:
            layer = running.layers_done
            if points is not None and stopped is None and layer > first:
                at_safepoint = (layer - first) % points.layers_apart == 0
                if at_safepoint:
                    queued = self._wait_for_device(queued)
                if layer == last or (at_safepoint and self._step_to_stop == plan.step):
                    stopped_at_s = self._clock.now_s()
                    stopped = self._take_out(running, suspends=points.suspends)
                    continue
            running.state = model.run_layer(layer, running.state, self._kv_pool, running.batch.attention)
            running.layers_done += 1
        return stopped, stopped_at_s

    def _wait_for_device(self, queued: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Keep at most one group of layers queued: layers queued on a GPU cannot be stopped.

        ``queued`` is the result of the call at the previous safepoint.
        """
        if not self._kv_pool.is_cuda:
            return None
        if queued is not None:
            queued.synchronize()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _take_out(self, running: _Pass, *, suspends: bool) -> _Pass:
        """Split the preemptible slices off the pass and return them; keep them if the step suspends them."""
        preemptible = [scheduled.preemptible for scheduled in running.slices]
        if all(preemptible):
            taken, running.slices = replace(running), ()
        else:
            taken = self._split(running, preemptible)
            kept = self._split(running, [not each for each in preemptible])
            running.slices, running.batch, running.state = kept.slices, kept.batch, kept.state
        self._suspended = taken if suspends else None
        return taken

    def _embedded(self, slices: tuple[ScheduledSlice, ...]) -> _Pass:
        """A pass of the slices before its first layer."""
        batch = self._batch_of(slices)
        return _Pass(slices, batch, self._model.embed(batch.token_ids, batch.attention), layers_done=0)

    def _resumed(self, slices: tuple[ScheduledSlice, ...]) -> _Pass:
        """The suspended pass with the resumed slices only."""
        suspended, self._suspended = self._suspended, None
        assert suspended is not None, "nothing is suspended"
        resumed = {scheduled.request_id for scheduled in slices}
        assert resumed <= {scheduled.request_id for scheduled in suspended.slices}
        if len(resumed) == len(suspended.slices):
            return suspended
        return self._split(suspended, [scheduled.request_id in resumed for scheduled in suspended.slices])

    def _split(self, running: _Pass, keep: Sequence[bool]) -> _Pass:
        """A pass of the kept slices only, with a copy of their rows."""
        slices = tuple(scheduled for scheduled, kept in zip(running.slices, keep, strict=True) if kept)
        counts = torch.tensor([scheduled.num_tokens for scheduled in running.slices])
        rows = torch.repeat_interleave(torch.tensor(keep), counts).nonzero().squeeze(1)
        rows = rows.to(running.state.residual.device)
        residual, delta = running.state
        state = HiddenState(residual[rows], None if delta is None else delta[rows])
        return _Pass(slices, self._batch_of(slices), state, running.layers_done)

    def _sample(self, running: _Pass) -> tuple[SampledToken, ...]:
        sampling = [scheduled.request_id for scheduled in running.slices if scheduled.samples]
        if not sampling:
            if self._kv_pool.is_cuda:  # nothing was read from the device, so it may still compute
                torch.cuda.current_stream(self._kv_pool.device).synchronize()
            return ()
        logits = self._model.logits(running.state, running.batch.sampled_rows)
        states = [self._states[request_id] for request_id in sampling]
        sampled = self._sampler.sample(logits, states)
        for state, (token_id, _) in zip(states, sampled, strict=True):
            state.append(token_id)
        return tuple(
            SampledToken(request_id, token_id, logprobs)
            for request_id, (token_id, logprobs) in zip(sampling, sampled, strict=True)
        )

    def _batch_of(self, slices: Sequence[ScheduledSlice]) -> FlatBatch:
        tokens = [
            self._states[scheduled.request_id].tokens(scheduled.start, scheduled.start + scheduled.num_tokens)
            for scheduled in slices
        ]
        return build_batch(slices, tokens, self.info.block_size, self._kv_pool.device)
