"""The executor that runs a real model, or a rank's part of one, with torch, on CPU or CUDA."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backfill.core.clock import WallClock
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    FailedRequest,
    ForcedTokens,
    PromptLogprobs,
    Resume,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
    WeightTransfers,
)
from backfill.core.request import RequestId
from backfill.execution.batch import FlatBatch, build_batch, host_batch
from backfill.execution.collectives import Handover, Stop
from backfill.execution.copies import BlockCopier
from backfill.execution.decode_graphs import DecodeGraphs
from backfill.execution.executor import Executor, ExecutorInfo, stopped_outcome
from backfill.execution.grammar_masks import GrammarMasks, TokenMasks
from backfill.execution.layer_pass import LayerPass, MicroBatch, rows_of, sampled_rows
from backfill.execution.micro_batches import MicroBatchStreams, split_step
from backfill.execution.offloading import LayerStreamer
from backfill.execution.pool_pair import CompletedCopies
from backfill.execution.prompt_scoring import score_prompts
from backfill.execution.sampler import ForbiddenTokens, RequestState, Sampler
from backfill.execution.stage import Stage
from backfill.models.decoder import DecoderModel

logger = logging.getLogger(__name__)

# Bounds the wait for a copy in an idle step: an arrival is not seen before the wait ends.
_MAX_WAIT_S = 0.05


class TorchExecutor(Executor):
    """Executes plans on one rank, which may be the only one.

    Of several ranks all run the same plans in the same order, and each knows its part of the outcome: the
    first rank of the last stage the tokens, the last stage all stops, others their own and earlier ones, and
    each rank its own copies and transfers.

    Owns the rank's part of the KV pool and the tokens of admitted requests.

    Args:
        model: the part of it that the rank holds.
        kv_pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, row_size]``, with the layers and KV
            heads of the rank; may be uninitialised. As many blocks as there can ever be.
        streams: with two micro-batches, the prefills and the decodes of a step are computed side by side.
        copier: to and from the host pool; None without one.
        streamer: fetches the weights of offloaded layers; None if the model has all layers.
        stage: the rank's place among others; None: it is alone.
        grammars: of structured outputs; None if no request has any.
        graphs: of the model's layers, for steps of decodes alone; None for none.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_pool: Tensor,
        info: ExecutorInfo,
        streams: MicroBatchStreams,
        copier: BlockCopier | None = None,
        streamer: LayerStreamer | None = None,
        stage: Stage | None = None,
        grammars: GrammarMasks | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.info = info
        self.grammars = grammars
        self._clock = WallClock()
        self._model = model
        self._stage = Stage.whole(model.num_layers) if stage is None else stage
        self._kv_pool = kv_pool
        self._copier = copier
        self._graphs = graphs
        self.streamer = streamer
        self._memory_error: Exception | None = None
        self._streams = streams
        self._sampler = Sampler(model.kernels, info.end_token_ids)
        self._states: dict[RequestId, RequestState] = {}
        self._sampled: Sequence[tuple[RequestId, int]] = ()  # in the last step, and not yet in the states
        self._suspended: dict[int, LayerPass] = {}  # by the plan's step; several may be in flight

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write zeros to the first blocks of the pool, so that their pages are mapped."""
        self._kv_pool[:num_blocks].zero_()

    def request_stop(self, step: int) -> None:
        self._stage.request_stop(step)

    @torch.inference_mode()
    def run(self, plan: StepPlan, sampled: Sequence[tuple[RequestId, int]] | None = None) -> StepOutcome:
        """See ``Executor.run``.

        Args:
            sampled: where there are several ranks, tokens of steps that were collected since the plan before:
                no rank knows yet which of them count. None: those that this executor sampled do.
        Raises: PeerFailed if another rank failed in the step.
        """
        self._stage.begin_step(plan)
        try:
            for request_id, token_id in self._sampled if sampled is None else sampled:
                state = self._states.get(request_id)
                if state is not None:  # else it was released
                    state.append(token_id)
            self._sampled = ()
            outcome = self._run(plan)
        except BaseException:
            self._stage.fail_step()
            raise
        self._sampled = outcome.tokens
        return outcome

    def close(self) -> None:
        """Leave the other ranks, and end copies and transfers. No other call may follow."""
        for each in (self._stage, self._copier, self.streamer, self.grammars):
            if each is not None:
                each.close()

    def _run(self, plan: StepPlan) -> StepOutcome:
        self._prepare(plan)
        match plan.work:
            case WaitForCopies():
                if self._copier is not None:
                    self._copier.wait(_MAX_WAIT_S)
                return self._outcome(())
            case Compute(slices=()):
                return self._outcome(())
            case work:
                masks = self._begin_masks(plan)
                received = self._stage.receive()  # whose rows are kept until both streams have read them
                with self._streams.forked():
                    running, last = self._begun(work, received)
                    stop = self._run_layers(running, plan, last, received.stop)
                if not self._stage.shard.is_last:
                    self._stage.hand_on(Handover(last, stop, running.state))
                # Completed copies are taken last: if the step failed after this, they would not be reported.
                scored = self._score(running)
                outcome = self._outcome(self._sample(running, plan, masks))
                if scored:
                    outcome = replace(outcome, prompt_logprobs=scored)
                if masks is not None and outcome.sampled:
                    outcome = self._within_grammars(outcome, masks.result())
                return outcome if stop is None else stopped_outcome(outcome, plan, *stop)

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
            self._states[admitted.request_id] = self._new_state(admitted)

    def _new_state(self, admitted: AdmittedRequest) -> RequestState:
        structured = admitted.sampling.structured_outputs
        if structured is None or not self._stage.samples:
            return RequestState(admitted)
        assert self.grammars is not None, "this executor was made without grammars"
        return RequestState(admitted, self.grammars.output(structured))

    def _begin_masks(self, plan: StepPlan) -> Future[TokenMasks] | None:
        """Find, beside the pass, which tokens the slices with grammars may sample."""
        if self.grammars is None:
            return None
        outputs = {
            each.request_id: grammar
            for each in plan.slices
            if each.samples and (grammar := self._states[each.request_id].grammar) is not None
        }
        return self.grammars.begin(outputs) if outputs else None

    def _drop_suspended(self, dropped: Set[RequestId]) -> None:
        for step, suspended in list(self._suspended.items()):
            names = {each.request_id for each in suspended.slices}
            if not names.isdisjoint(dropped):
                self._keep_suspended(step, names - dropped, suspended)

    def _keep_suspended(self, step: int, kept: Set[RequestId], suspended: LayerPass) -> None:
        """Of a suspended step, keep the slices of these requests."""
        if kept:
            self._suspended[step] = self._only(kept, suspended)
        else:
            self._suspended.pop(step, None)

    def _change_memory(self, plan: StepPlan) -> None:
        """Drop suspended slices, divide the memory, change the interval and move blocks.

        If that fails, no later step can run.
        """
        if self._memory_error is not None:
            raise RuntimeError("what precedes a step has failed, so no step can run") from self._memory_error
        try:
            if plan.dropped:
                self._drop_suspended(frozenset(plan.dropped))
            if self.streamer is not None:
                largest = None if plan.memory is None else plan.memory.interval
                self.streamer.change(plan.offload_interval, largest, plan.bus_share)
                if plan.memory is not None:
                    logger.info(
                        "device memory: %d KV blocks, %d layers of weights",
                        plan.memory.num_blocks,
                        self.streamer.num_buffers,
                    )
            for source, target in plan.moves:
                self._kv_pool[target].copy_(self._kv_pool[source])
        except Exception as error:  # the control plane counts all of it as done
            self._memory_error = error
            raise

    def _outcome(self, sampled: tuple[SampledToken, ...]) -> StepOutcome:
        """Of a step without stopped slices, with the copies that have completed."""
        completed = CompletedCopies() if self._copier is None else self._copier.take_completed()
        return StepOutcome(
            sampled,
            completed_copies=completed.blocks,
            completed_slot_copies=completed.slots,
            weight_transfers=WeightTransfers() if self.streamer is None else self.streamer.take_transfers(),
        )

    def _within_grammars(self, outcome: StepOutcome, masks: TokenMasks) -> StepOutcome:
        """Without tokens of requests that have failed, and with those that are forced after the others."""
        sampled, failed, forced = [], [], []
        for token in outcome.sampled:
            request_id = token.request_id
            if request_id in masks.errors:
                failed.append(FailedRequest(request_id, masks.errors[request_id]))
                continue
            sampled.append(token)
            state = self._states[request_id]
            room = (state.sampling.max_tokens or 0) - state.num_output_tokens - 1
            if request_id in masks.forced and room > 0 and state.sampling.logprobs is None:
                forced.append(ForcedTokens(request_id, masks.forced[request_id][:room]))
        return replace(outcome, sampled=tuple(sampled), failed=tuple(failed), forced=tuple(forced))

    def _begun(self, work: Compute | Resume, received: Handover) -> tuple[LayerPass, int]:
        """The pass before its first layer here, and the layer before which its stoppable slices end."""
        stage = self._stage
        if isinstance(work, Resume):
            suspended = self._take_suspended(work)
            if suspended is not None:
                return suspended, suspended.layers_done + work.num_layers
            assert len(stage.layers) < self._model.num_layers, "nothing is suspended"
        slices = work.slices
        if received.stop is not None:
            slices = tuple(each for each in slices if not each.stoppable)
        micro_batches = []
        embeds = stage.layers.start == 0 and isinstance(work, Compute)
        if embeds and self._graphs is not None and self._graphs.holds(slices):
            tokens = self._tokens_of(slices)
            batch, state = self._graphs.begin(host_batch(slices, tokens, self.info.block_size))
            whole = MicroBatch(tuple(slices), batch, state, 0, self._graphs)
            return LayerPass([whole], 0), received.last_layer
        if embeds or received.state is not None:  # else other stages have the slices
            start = 0
            for stream, part in enumerate(split_step(slices, self._streams.num_micro_batches)):
                with self._streams.of(stream):
                    batch = self._batch_of(part)
                    if received.state is None:
                        state = self._model.embed(batch.token_ids, batch.attention)
                    else:
                        state = rows_of(received.state, start, start + len(batch.token_ids))
                    start += len(batch.token_ids)
                    micro_batches.append(MicroBatch(part, batch, state, stream))
        return LayerPass(micro_batches, stage.layers.start), received.last_layer

    def _take_suspended(self, work: Resume) -> LayerPass | None:
        """The resumed slices only; others of their step stay. None if this stage did not suspend them."""
        wanted = {(each.request_id, each.start) for each in work.slices}
        for step, suspended in self._suspended.items():
            if wanted <= {(each.request_id, each.start) for each in suspended.slices}:
                resumed = {request_id for request_id, _ in wanted}
                names = {each.request_id for each in suspended.slices}
                self._keep_suspended(step, names - resumed, suspended)
                return self._only(resumed, suspended)
        return None

    def _run_layers(self, running: LayerPass, plan: StepPlan, last: int, stop: Stop | None) -> Stop | None:
        """Run the pass to the end of the stage, its stoppable slices to layer ``last`` at most.

        Args:
            stop: of an earlier stage.
        Returns: the stop of that one or of this stage, if any.
        """
        model, stage, streams, streamer = self._model, self._stage, self._streams, self.streamer
        safepoints = stage.safepoints(running.layers_done, plan.safepoints)
        num_layers, end = model.num_layers, stage.layers.stop
        while running.micro_batches and (layer := running.layers_done) < num_layers:
            if stop is None and (layer == last or layer in safepoints):
                if layer in safepoints:
                    streams.wait_for_previous_group()
                if layer == last or stage.stop_agreed:
                    stop = self._take_out(running, plan)
                    continue
            if layer == end:
                break
            stage.begin_layer(layer)
            left = safepoints if stop is None else frozenset()
            # Kernels that heed a stop end a call by themselves; else a call ends at each safepoint, and where
            # something is done between two layers, after each layer.
            takes_turns = streamer is not None or len(running.micro_batches) > 1
            heeds_stop = model.heeds_stops and not takes_turns
            pauses = {layer + 1} if takes_turns else {last, end} if heeds_stop else {last, end} | left
            layers = stage.layers_until(layer, pauses)
            stage.arm(layers, left)
            signal = stage.stop_signal(plan.safepoints) if left and heeds_stop else None
            if streamer is not None:
                streamer.before(layer)
            for each in running.micro_batches:
                with streams.of(each.stream):
                    done = each.run_layers(layers, model, self._kv_pool, signal)
            if streamer is not None:
                streamer.after(layer)
            running.layers_done += done
        return stop

    def _take_out(self, running: LayerPass, plan: StepPlan) -> Stop:
        """Split the stoppable slices off the pass; keep them if the step suspends them."""
        assert plan.safepoints is not None, "a step without safepoints was stopped"
        at_s = self._clock.now_s()
        if plan.safepoints.suspends:
            stoppable = {each.request_id for each in running.slices if each.stoppable}
            self._suspended[plan.step] = self._only(stoppable, running)
        others = {each.request_id for each in running.slices if not each.stoppable}
        running.micro_batches = self._only(others, running).micro_batches
        return Stop(running.layers_done, at_s)

    def _only(self, kept: Set[RequestId], of: LayerPass) -> LayerPass:
        return of.with_only(kept, self._batch_of, self._streams)

    def _score(self, running: LayerPass) -> tuple[PromptLogprobs, ...]:
        if not self._stage.shard.is_last:
            return ()
        return score_prompts(self._model, running.micro_batches, self._states)

    def _sample(
        self, running: LayerPass, plan: StepPlan, masks: Future[TokenMasks] | None
    ) -> tuple[SampledToken, ...]:
        """Tokens on the first rank of the last stage."""
        samples = self._stage.shard.is_last and any(scheduled.samples for scheduled in running.slices)
        logits = self._model.logits(*sampled_rows(running.micro_batches)) if samples else None
        if logits is None:
            self._streams.synchronize()  # nothing was read from the device, so it may still compute
            return ()
        return self._drawn(logits, running, plan, None if masks is None else masks.result())

    def _drawn(
        self, logits: Tensor, running: LayerPass, plan: StepPlan, masks: TokenMasks | None
    ) -> tuple[SampledToken, ...]:
        """A token for each row of ``logits``, in the plan's order."""
        sampling = [scheduled.request_id for scheduled in running.slices if scheduled.samples]
        forbidden: ForbiddenTokens | None = None
        known = {} if masks is None else masks.rows
        rows = {row: known[each] for row, each in enumerate(sampling) if each in known}
        if masks is not None and rows:
            of_rows = masks.forbidden[list(rows.values())]
            forbidden = ForbiddenTokens(list(rows), torch.from_numpy(of_rows).to(logits.device))
        drawn = self._sampler.sample(logits, [self._states[each] for each in sampling], forbidden)
        tokens = {
            request_id: SampledToken(request_id, token_id, logprobs)
            for request_id, (token_id, logprobs) in zip(sampling, drawn, strict=True)
        }
        return tuple(tokens[each.request_id] for each in plan.slices if each.request_id in tokens)

    def _batch_of(self, slices: Sequence[ScheduledSlice]) -> FlatBatch:
        return build_batch(slices, self._tokens_of(slices), self.info.block_size, self._kv_pool.device)

    def _tokens_of(self, slices: Sequence[ScheduledSlice]) -> list[NDArray[np.int64]]:
        states = self._states
        return [states[each.request_id].tokens(each.start, each.start + each.num_tokens) for each in slices]
