"""When the requests of a run arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.workloads.arrivals import (
    Instants,
    Phase,
    RandomSource,
    burstiness_of_cv,
    gamma_arrivals,
    phased_arrivals,
    ramp_arrivals,
    rescaled_to_rate,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalConfig:
    """The arrival process: a rate, phases, a ramp, or a trace's own times.

    Attributes:
        request_rate: requests per second. inf sends all at once, or a trace at its own times.
        burstiness: shape of the gamma-distributed gaps: 1 is Poisson (default), less is burstier.
        cv: coefficient of variation of the gaps, in place of `burstiness`, which is 1/cv².
        phases: ON/OFF load: seconds:rate of each phase, such as 30:4,60:0. The phases repeat.
        ramp_up_strategy: how the rate changes over the requests.
        ramp_up_start_rps: rate at the first request.
        ramp_up_end_rps: rate at the last request.
        self_timed: a trace keeps its times, stretched to `request_rate` if that is finite.
    """

    request_rate: float = math.inf
    burstiness: float | None = None
    cv: float | None = None
    phases: str | None = None
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    self_timed: bool = True

    def validate(self) -> None:
        """Raises: ConfigError for options that exclude each other or are out of range."""
        check_types(self)
        if self.burstiness is not None and self.cv is not None:
            raise ConfigError("`burstiness` and `cv` say the same; give one of them.")
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if None in ramp and any(value is not None for value in ramp):
            raise ConfigError("`ramp_up_strategy`, `ramp_up_start_rps` and `ramp_up_end_rps` go together.")
        chosen = [math.isfinite(self.request_rate), self.phases is not None, self.ramp is not None]
        if sum(chosen) > 1:
            raise ConfigError("Only one of `request_rate`, `phases` and `ramp_up_strategy` can be given.")
        self.instants(1, None, np.random.default_rng(0))

    @property
    def gamma_shape(self) -> float:
        """Shape of the gamma distribution of gaps; inf for constant gaps. Raises: ConfigError."""
        if self.cv is not None:
            return burstiness_of_cv(self.cv)
        return 1.0 if self.burstiness is None else self.burstiness

    @property
    def ramp(self) -> tuple[float, float] | None:
        """Rates at the first and the last request, per second."""
        if self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
            return None
        return self.ramp_up_start_rps, self.ramp_up_end_rps

    def phase_list(self) -> tuple[Phase, ...]:
        """Empty without ``phases``. Raises: ConfigError for text of another shape."""
        if self.phases is None:
            return ()
        try:
            pairs = [part.split(":") for part in self.phases.split(",")]
            return tuple(Phase(float(duration), float(rate)) for duration, rate in pairs)
        except ValueError:
            raise ConfigError(f"`phases` takes SECONDS:RATE,SECONDS:RATE,..., got {self.phases!r}.") from None

    def instants(self, count: int, recorded: Instants | None, rng: RandomSource) -> Instants:
        """Arrival instants of ``count`` requests, in seconds. Raises: ConfigError for values out of range.

        Args:
            recorded: the trace's own instants, if it has them.
        """
        if phases := self.phase_list():
            return phased_arrivals(count, phases, self.gamma_shape, rng)
        if self.ramp is not None:
            is_exponential = self.ramp_up_strategy == "exponential"
            return ramp_arrivals(count, *self.ramp, self.gamma_shape, rng, exponential=is_exponential)
        if recorded is not None and self.self_timed:
            return (
                recorded if math.isinf(self.request_rate) else rescaled_to_rate(recorded, self.request_rate)
            )
        return gamma_arrivals(count, self.request_rate, self.gamma_shape, rng)
