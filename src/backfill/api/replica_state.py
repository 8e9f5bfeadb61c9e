"""What a server tells a router of itself (``GET /state``; docs/router.md)."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import msgspec

from backfill.api.admission import Admission
from backfill.api.online_load import OnlineLoad
from backfill.engine.messages import StepReport
from backfill.jobs.manager import JobManager
from backfill.protocol.preparer import EngineFacts
from backfill.protocol.replica_state import ReplicaState

_MEAN_WEIGHT = 0.2  # of the last step
_WEIGHTS = ("*.safetensors", "*.gguf")


class StateReporter:
    """Makes ``ReplicaState``. One for each server process.

    Args:
        folder: of the model.
    """

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self._instance = uuid.uuid4().hex
        self._names = names
        self._digest = model_digest(folder)
        self._step_s = 0.0

    def on_report(self, report: StepReport) -> None:
        """Count a step."""
        step = report.stats.step
        if step.kind == "none":
            running = report.stats.online.num_running + report.stats.offline.num_running
            self._step_s = self._step_s if running else 0.0
        else:
            self._step_s += (step.seconds - self._step_s) * (_MEAN_WEIGHT if self._step_s else 1.0)

    def state(
        self,
        phase: str,
        admission: Admission,
        load: OnlineLoad | None,
        jobs: JobManager | None,
        facts: EngineFacts | None,
    ) -> ReplicaState:
        """The state of the server that has these."""
        state = ReplicaState(
            instance=self._instance,
            phase=phase,
            models=self._names,
            digest=self._digest,
            is_offline_suspended=admission.is_offline_suspended,
            is_offline_quarantined=admission.is_offline_quarantined,
            step_s=self._step_s if admission.num_open else 0.0,
            num_online=admission.num_open_online,
            num_offline=admission.num_open - admission.num_open_online,
            num_lines=0 if jobs is None else jobs.feeder.num_running,
            store="" if jobs is None else jobs.store_id,
        )
        if facts is not None:
            state = msgspec.structs.replace(
                state,
                max_model_len=facts.info.max_model_len,
                max_num_seqs=facts.scheduler.max_num_seqs,
                kv_tokens=facts.info.num_blocks * facts.info.block_size,
                ttft_slo_s=facts.default_slo.ttft_s,
            )
        if load is not None:
            state = msgspec.structs.replace(
                state,
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                waiting_prompt_tokens=load.num_waiting_tokens,
                online_tokens=load.num_context_tokens,
            )
        return state


def model_digest(folder: Path) -> str:
    """Of a model's configuration and the sizes of its weights, so that no weights are read."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
