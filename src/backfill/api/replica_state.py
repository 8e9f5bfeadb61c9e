"""What a server tells a router of itself (``GET /state``; docs/router.md)."""

from __future__ import annotations

import hashlib
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backfill.core.errors import ModelError
from backfill.engine.messages import StepReport
from backfill.models.config import ModelConfig
from backfill.preparation.resources import resources_of
from backfill.protocol.preparer import EngineFacts

if TYPE_CHECKING:
    from backfill.api.state import ServerState

_MEAN_WEIGHT = 0.2  # of the last step
_WEIGHTS = ("*.safetensors", "*.gguf")


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /state``.

    Attributes:
        instance: of the server process; another one has an empty cache.
        phase: ``ready``, or why requests are not accepted.
        models: names that requests may use; the first is echoed.
        digest: equal for servers of the same model.
        is_offline_suspended: offline requests are refused.
        max_model_len, max_num_seqs, kv_tokens, ttft_slo_s: limits and objective of the engine; 0 until it
            was ready once.
        prefill_tokens_per_s: predicted; None without a cost model.
        step_s: mean seconds of the last steps; 0 when nothing runs.
        waiting_prompt_tokens: of online requests without a first token. None without a cost model.
        num_online, online_tokens: online choices that have not ended, and about their tokens.
        num_offline: offline choices that have not ended.
        resources: fields of ``ResourceModel``, by which batches are divided; None until the engine was ready.
    """

    instance: str
    phase: str
    models: tuple[str, ...]
    digest: str
    is_offline_suspended: bool = False
    max_model_len: int = 0
    max_num_seqs: int = 0
    kv_tokens: int = 0
    ttft_slo_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    step_s: float = 0.0
    waiting_prompt_tokens: int | None = None
    num_online: int = 0
    online_tokens: int = 0
    num_offline: int = 0
    resources: tuple[float, float, float] | None = None


class StateReporter:
    """Makes ``ReplicaState``. One for each server process.

    Args:
        folder: of the model.
    """

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self._instance = uuid.uuid4().hex
        self._names = names
        self._digest = model_digest(folder)
        self._folder = folder
        self._step_s = 0.0
        self._resources_of: EngineFacts | None = None
        self._resources: tuple[float, float, float] | None = None

    def on_report(self, report: StepReport) -> None:
        """Count a step."""
        step = report.stats.step
        if step.kind == "none":
            running = report.stats.online.num_running + report.stats.offline.num_running
            self._step_s = self._step_s if running else 0.0
        else:
            self._step_s += (step.seconds - self._step_s) * (_MEAN_WEIGHT if self._step_s else 1.0)

    def state(self, server: ServerState) -> ReplicaState:
        admission, load = server.admission, server.online_load
        state = ReplicaState(
            instance=self._instance,
            phase=server.phase.value,
            models=self._names,
            digest=self._digest,
            is_offline_suspended=admission.is_offline_suspended,
            step_s=self._step_s if admission.num_open else 0.0,
            num_online=admission.num_open_online,
            num_offline=admission.num_open - admission.num_open_online,
        )
        facts = None if server.preparer is None else server.preparer.facts
        if facts is not None:
            state = msgspec.structs.replace(
                state,
                max_model_len=facts.info.max_model_len,
                max_num_seqs=server.engine_config.scheduler.max_num_seqs,
                kv_tokens=facts.info.num_blocks * facts.info.block_size,
                ttft_slo_s=facts.default_slo.ttft_s,
                resources=self._resources_on(facts),
            )
        if load is not None:
            state = msgspec.structs.replace(
                state,
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                waiting_prompt_tokens=load.num_waiting_tokens,
                online_tokens=load.num_context_tokens,
            )
        return state

    def _resources_on(self, facts: EngineFacts) -> tuple[float, float, float] | None:
        if self._resources_of is not facts:
            self._resources_of = facts
            with suppress(ModelError):
                found = resources_of(facts, ModelConfig.from_folder(self._folder))
                self._resources = found.token_s, found.prompt_pair_s, found.cached_token_s
        return self._resources


def model_digest(folder: Path) -> str:
    """Of a model's configuration and the sizes of its weights, so that no weights are read."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
