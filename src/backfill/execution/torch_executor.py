"""The executor that runs a real model with torch, on CPU or CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.execution.batch import FlatBatch, build_batch
from backfill.execution.executor import ExecutorInfo
from backfill.execution.request_state import RequestState
from backfill.execution.sampler import Sampler
from backfill.models.decoder import DecoderModel


class TorchExecutor:
    """See ``Executor``. Owns the KV pool and the tokens of the requests it was given.

    Args:
        kv_pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; may be uninitialised.
    """

    def __init__(self, model: DecoderModel, kv_pool: Tensor, info: ExecutorInfo) -> None:
        self.info = info
        self._model = model
        self._kv_pool = kv_pool
        self._sampler = Sampler(info.end_token_ids)
        self._states: dict[RequestId, RequestState] = {}

    @property
    def num_layers(self) -> int:
        return self._model.num_layers

    def fill_kv_pool(self) -> None:
        """Write zeros to the whole pool, so that its memory is really there."""
        self._kv_pool.zero_()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        for request_id in plan.released:
            self._states.pop(request_id, None)
        for admitted in plan.admitted:
            self._states[admitted.request_id] = RequestState(admitted)
        if not plan.slices:
            return StepOutcome(sampled=())
        logits = self._forward(self._batch_of(plan))
        sampling = [piece.request_id for piece in plan.slices if piece.samples]
        if not sampling:
            return StepOutcome(sampled=())
        states = [self._states[request_id] for request_id in sampling]
        sampled = self._sampler.sample(logits, states)
        for state, (token_id, _) in zip(states, sampled, strict=True):
            state.append(token_id)
        return StepOutcome(
            sampled=tuple(
                SampledToken(request_id, token_id, logprobs)
                for request_id, (token_id, logprobs) in zip(sampling, sampled, strict=True)
            )
        )

    def _batch_of(self, plan: StepPlan) -> FlatBatch:
        tokens = [
            self._states[piece.request_id].tokens(piece.start, piece.start + piece.num_tokens)
            for piece in plan.slices
        ]
        return build_batch(plan.slices, tokens, self.info.block_size, self._kv_pool.device)

    def _forward(self, batch: FlatBatch) -> Tensor:
        """Logits ``[number of sampled rows, vocab]``."""
        model, attention = self._model, batch.attention
        state = model.embed(batch.token_ids, attention)
        for index in range(model.num_layers):
            state = model.run_layer(index, state, self._kv_pool, attention)
        return model.logits(state, batch.sampled_rows)
