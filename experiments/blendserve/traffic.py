"""Online traffic whose kind changes over time: prompt-heavy and decode-heavy by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from backfill.simulation.replay import Arrival, Lengths
from backfill.simulation.workloads import DrawnLengths
from backfill.workloads.arrivals import burstiness_of_cv
from backfill.workloads.lengths import LengthDistribution
from experiments.blendserve.optimum import WorkModel
from experiments.phases import Phase, phased_arrivals

TrafficName = Literal["alternating", "steady"]
TRAFFICS: tuple[TrafficName, ...] = get_args(TrafficName)

# Chosen: a summary or a completion of code, and a chat with long answers. On an A100 with Llama-3-8B their
# densities are about 12 and 1.
KINDS: Mapping[str, DrawnLengths] = {
    "prompts": DrawnLengths(
        LengthDistribution(2500, 0.5, "lognormal"), LengthDistribution(80, 0.7, "lognormal")
    ),
    "answers": DrawnLengths(
        LengthDistribution(223, 1.15, "lognormal"), LengthDistribution(1500, 0.5, "lognormal")
    ),
}
_MAX_LEN = 8192
_NUM_FOR_MEAN = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineTraffic:
    """Online requests of a run.

    Attributes:
        name: ``alternating``: prompt-heavy requests for ``phase_s``, then decode-heavy ones for as long, and
            so on; ``steady``: both at any time.
        load: share of the device's time that the requests take by themselves, perfectly batched.
        phase_s: seconds of a phase. A steady traffic has none.
        cv: coefficient of variation of the gaps between requests; 1 is Poisson.
    """

    name: TrafficName
    load: float
    phase_s: float
    cv: float
    duration_s: float
    seed: int

    def arrivals(self, work: WorkModel) -> tuple[Arrival, ...]:
        """The requests in order of arrival; the same for the same traffic."""
        rng = np.random.default_rng([self.seed, 2])
        found = [
            arrival
            for index, lengths in enumerate(KINDS.values())
            for arrival in self._of_kind(lengths, index, work, rng)
        ]
        return tuple(sorted(found))

    def _of_kind(
        self, lengths: DrawnLengths, index: int, work: WorkModel, rng: np.random.Generator
    ) -> list[Arrival]:
        rate_per_s = self.load / _device_s(lengths, work)
        if self.name == "steady":
            phases = [Phase(self.duration_s, rate_per_s / len(KINDS))]
        else:
            phases = [Phase(self.phase_s, rate_per_s if turn == index else 0.0) for turn in range(len(KINDS))]
        mean_rate = sum(each.duration_s * each.rate_per_s for each in phases) / sum(
            each.duration_s for each in phases
        )
        # Phases that the duration cuts may have more requests than the mean rate says.
        count = max(1, round(mean_rate * (self.duration_s + len(phases) * phases[0].duration_s)))
        instants = phased_arrivals(count, phases, burstiness_of_cv(self.cv), rng)
        drawn = lengths.sample(count, _MAX_LEN, rng)
        return [
            Arrival(float(at_s), each)
            for at_s, each in zip(instants, drawn, strict=True)
            if at_s < self.duration_s
        ]


def _device_s(lengths: DrawnLengths, work: WorkModel) -> float:
    """Device seconds of a mean request, of many that overlap perfectly."""
    return work.least_s(work.of_requests(_sample(lengths))) / _NUM_FOR_MEAN


def _sample(lengths: DrawnLengths) -> Sequence[Lengths]:
    return lengths.sample(_NUM_FOR_MEAN, _MAX_LEN, np.random.default_rng(0))
