"""FlexGen as Select-N's paper compares with it: a portion of every layer, from a static estimate."""

from __future__ import annotations

from typing import NamedTuple

from backfill.costs.derived import peak_step_s
from backfill.costs.load import StepLoad
from backfill.offloading.interval import NUM_STAGING_BUFFERS
from experiments.selectn.model import OffloadedModel, PhaseLoad


class StaticEstimate(NamedTuple):
    """Which portion of every layer is offloaded, decided without running anything (section 3.3).

    FlexGen takes a layer's transfer and its computation to overlap, so a layer takes the longer of the two.

    Attributes:
        hides: the transfer must fit into the estimated computation and the objective's slack over it, which
            is how the paper describes the outcome. Else only the transfers must meet the objective, as
            FlexGen's cost model would have it for an objective in seconds: then the estimate has no effect.
        counts_bytes: the estimate is the roofline at the data sheet's peaks. Else FLOPs at the peak alone,
            as in the cost model that FlexGen published.
    """

    hides: bool
    counts_bytes: bool

    def portion(
        self, model: OffloadedModel, load: PhaseLoad, slo_s: float, slack: float, sharers: int = 1
    ) -> float:
        """Args: slack: of the objective over the time without offloading; sharers: devices on the bus."""
        window_s = slo_s
        if self.hides:
            steps = StepLoad.of(load.slices)
            window_s = peak_step_s(model.shape, model.device, steps, counts_bytes=self.counts_bytes)
            window_s *= 1.0 + slack
        return min(1.0, window_s / (sharers * model.shape.num_layers * model.transfer_s))


FLEXGEN = {
    "flexgen": StaticEstimate(hides=True, counts_bytes=True),
    "flexgen-flops": StaticEstimate(hides=True, counts_bytes=False),
    "flexgen-slo": StaticEstimate(hides=False, counts_bytes=True),
}


def device_layers(model: OffloadedModel, portion: float) -> float:
    """Layers' worth of memory if this portion of each is offloaded: what stays, and two parts in staging."""
    return model.shape.num_layers * (1.0 - portion) + NUM_STAGING_BUFFERS * portion


def least_portion(model: OffloadedModel, kv_tokens: int) -> float:
    """The portion that has to be offloaded so that so many tokens of KV fit; above 1 if none will do."""
    num_layers = model.shape.num_layers
    short = kv_tokens - model.kv_tokens(None)
    saved_per_portion = (num_layers - NUM_STAGING_BUFFERS) * model.shape.layer_bytes
    return max(0.0, (short + 1) * model.shape.kv_bytes_per_token / saved_per_portion) if short > 0 else 0.0
