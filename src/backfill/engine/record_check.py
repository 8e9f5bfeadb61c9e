"""Compares a performance record with the steps that are served, and corrects one that a start measured."""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from backfill.core.plan import ScheduledSlice, StepPlan
from backfill.costs.fit import TimedStep, fit_cost_model
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.offloading.record import PerformanceRecord, RecordedLoad

logger = logging.getLogger(__name__)

NUM_STEPS = 64  # whose times are compared at once
WRONG = 0.25  # what most of them must differ by, all in one direction

_SHORTEST_S = 1e-9  # a fitted step may take no time
_ROW_KNOTS = (1, 16, 64, 256, 1024)
_SAMPLED_KNOTS = (1, 64)
_REMEDY = "`backfill profile --offload` measures it thoroughly"


class RecordCheck:
    """Watches whether steps take what the record says.

    A record that a start measured is scaled by the ratio, for the next start: the interval of this engine
    stays. One of ``backfill profile --offload`` is left as it is, and a warning says so once.

    Args:
        save: the corrected record; called on a thread of its own, because a disk may hang.
        has_own_link: transfers are compared too. On a bus they take what the others leave.
    """

    def __init__(
        self,
        record: PerformanceRecord,
        save: Callable[[PerformanceRecord], None],
        *,
        has_own_link: bool,
    ) -> None:
        self._save = save
        self._has_own_link = has_own_link
        self._ratios: deque[float] = deque(maxlen=NUM_STEPS)
        self._transfers_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._is_silent = False
        self._use(record)

    def observe(self, plan: StepPlan, computed_s: float, transfer_s: float) -> None:
        """A whole step was computed in so long, without waiting for weights.

        It counts if it is of the kind that the record has: decodes alone, or whole prompts.

        Args:
            transfer_s: what a transfer took lately; 0 if that is not known.
        """
        if self._is_silent or not _is_of_one_phase(plan.slices):
            return
        load = StepLoad.of_slices(plan.slices)
        if not any(_is_within(load, each) for each in self._loads):
            return
        self._ratios.append(computed_s / max(self._cost.step_time_s(load), _SHORTEST_S))
        if transfer_s > 0.0:
            self._transfers_s.append(transfer_s)
        if len(self._ratios) == NUM_STEPS:
            self._compare()
            self._ratios.clear()
            self._transfers_s.clear()

    def _use(self, record: PerformanceRecord) -> None:
        self.record = record
        self._cost = _cost_of(record)
        self._loads = [_load_of(each) for each in record.loads]

    def _compare(self) -> None:
        compute = _wrong_by(list(self._ratios))
        typical_s = self.record.typical_transfer_s or self.record.transfer_s
        transfers = 1.0
        if self._has_own_link and typical_s > 0.0 and len(self._transfers_s) > NUM_STEPS // 2:
            transfers = _wrong_by([each / typical_s for each in self._transfers_s])
        if compute == transfers == 1.0:
            return
        differs = " and ".join(
            f"{what} take {ratio:.2f} times what the performance record says"
            for what, ratio in (("steps", compute), ("transfers", transfers))
            if ratio != 1.0
        )
        if self.record.is_thorough:
            self._is_silent = True
            logger.warning("over %d steps %s; %s again", NUM_STEPS, differs, _REMEDY)
            return
        logger.warning(
            "over %d steps %s, which is corrected: the next start with offload_interval auto goes by it; %s",
            NUM_STEPS,
            differs,
            _REMEDY,
        )
        corrected = self.record.scaled(compute, transfers)
        note = f" Corrected by {compute:.2f} and transfers by {transfers:.2f} from served steps."
        # The other processes of that time are not what its times are of any more.
        corrected = replace(
            corrected, provenance=self.record.provenance.partition(" Corrected")[0] + note, others_share=0.0
        )
        self._use(corrected)
        threading.Thread(target=self._save, args=(corrected,), name="record-saver", daemon=True).start()


def _cost_of(record: PerformanceRecord) -> CostModel:
    """Of steps that do not wait for weights: what the record says of its loads, and of those between them."""
    steps = [
        TimedStep(_load_of(each), max(record.times_of(each).resident_step_s, _SHORTEST_S))
        for each in record.loads
    ]
    return fit_cost_model(steps, _ROW_KNOTS, _SAMPLED_KNOTS)


def _load_of(load: RecordedLoad) -> StepLoad:
    shape = (0, load.length, True) if load.phase == "prefill" else (load.length, 1, True)
    return StepLoad.of([shape] * load.batch_size)


def _is_of_one_phase(slices: Sequence[ScheduledSlice]) -> bool:
    decodes = all(each.num_tokens == 1 and each.start > 0 for each in slices)
    return decodes or all(each.start == 0 and each.samples for each in slices)


def _is_within(load: StepLoad, other: StepLoad) -> bool:
    return (
        load.num_requests <= other.num_requests
        and load.num_tokens <= other.num_tokens
        and load.prefill_pairs <= other.prefill_pairs
        and load.decode_context_tokens <= other.decode_context_tokens
    )


def _wrong_by(ratios: list[float]) -> float:
    """The median if most are beyond the bound on one side; else 1."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return median if low > 1.0 + WRONG or high < 1.0 / (1.0 + WRONG) else 1.0
