"""An engine's facts, as the preparation process needs them."""

from __future__ import annotations

from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.execution.executor import ExecutorInfo
from backfill.protocol.preparer import EngineFacts

FACTS = EngineFacts(
    info=ExecutorInfo(64, 16, 512, 49152, (2,), "cpu", "float32"),
    default_slo=SLO(1.0, 0.15),
    profile=None,
    scheduler=SchedulerConfig(),
)
