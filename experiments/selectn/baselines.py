"""FlexGen as Select-N's paper compares with it: a portion of every layer, from a static estimate."""

from __future__ import annotations

from typing import NamedTuple

from backfill.costs.load import StepLoad
from backfill.offloading.interval import NUM_STAGING_BUFFERS
from experiments.derived import rows_roofline_s
from experiments.model_work import Device, ModelShape, operator_work
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


def peak_step_s(shape: ModelShape, device: Device, load: StepLoad, *, counts_bytes: bool) -> float:
    """Seconds of a step at the data sheet's peaks, a lower bound.

    Args:
        counts_bytes: at the memory's bandwidth too, where that takes longer; else FLOPs alone.
    """
    n = load.num_tokens
    pairs = load.prefill_pairs + load.decode_context_tokens
    context = load.prefill_context_tokens + load.decode_context_tokens
    flops_s = 4 * shape.hidden * shape.num_layers * pairs / device.flops
    output_flops = 2 * shape.vocab * shape.hidden * load.num_sampled
    if not counts_bytes:
        operators = operator_work(shape, n, 1)
        layer = sum(operators[name].flops * count for name, count in shape.layer_operators.items())
        return flops_s + (shape.num_layers * layer + output_flops) / device.flops
    attention_s = max(flops_s, context * shape.kv_bytes_per_token / device.bandwidth)
    output_s = max(output_flops / device.flops, shape.vocab * shape.hidden * 2 / device.bandwidth)
    return rows_roofline_s(shape, device, n) + attention_s + (output_s if load.num_sampled else 0.0)
