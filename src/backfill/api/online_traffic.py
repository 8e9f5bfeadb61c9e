"""What online requests compute, read and hold, as whoever orders offline work is told."""

from __future__ import annotations

from backfill.api.online_load import OnlineLoad
from backfill.core.decaying_peak import DecayingPeak
from backfill.engine.messages import StepReport
from backfill.preparation.messages import OnlineTraffic

_PERIOD_S = 1.0


class OnlineTrafficMeter:
    """Means over periods of about a second, from the engine's reports. The first begins with a report.

    Decodes read the KV of all online requests in every step with online work. That is counted by
    ``OnlineLoad``'s estimate of their tokens. What they hold is the peak of this estimate, which decays: as
    much may come again soon.
    """

    def __init__(self, load: OnlineLoad) -> None:
        self._load = load
        self._began_s: float | None = None
        self._num_computed = 0  # by the engine that runs now
        self._num_reads = 0
        self._peak_tokens = DecayingPeak()

    def on_report(self, report: StepReport, now_s: float) -> OnlineTraffic | None:
        """Count a step. Returns: the mean of a period that has ended; None within one."""
        self._peak_tokens.note(self._load.num_context_tokens, now_s)
        num_computed = report.stats.online.totals.num_computed_tokens
        if self._began_s is None or num_computed < self._num_computed:  # a new engine counts from 0
            self._begin(now_s, num_computed)
            return None
        if report.stats.step.kind in ("online", "mixed"):
            self._num_reads += self._load.num_context_tokens
        elapsed_s = now_s - self._began_s
        if elapsed_s < _PERIOD_S:
            return None
        num_new = num_computed - self._num_computed
        traffic = OnlineTraffic(
            num_new / elapsed_s, self._num_reads / elapsed_s, int(self._peak_tokens.value)
        )
        self._begin(now_s, num_computed)
        return traffic

    def _begin(self, now_s: float, num_computed: int) -> None:
        self._began_s, self._num_computed, self._num_reads = now_s, num_computed, 0
