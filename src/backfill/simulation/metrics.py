"""Figures of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.simulation.replay import ReplayResult


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """One policy's figures on one workload. Times are in seconds, rates are per second of its duration.

    Objectives are met by request as DistServe and ``vllm bench serve --goodput`` count them: the first token
    within TTFT, and the mean gap between tokens within TPOT.

    Attributes:
        ttft_attainment: share of online requests whose first token met its objective.
        tpot_attainment: share of online requests whose mean gap met its objective.
        itl_attainment: share of gaps between tokens that met their objective.
        attainment: share of online requests that met both objectives.
        goodput_rps: online requests that met both objectives, per second.
        normalized_latency_s: mean over online requests of the time from arrival to the last token, divided
            by the tokens of the output (BROS, section 7.1).
        offline_rps: offline requests completed per second.
        total_tok_s: prompt and output tokens computed. A recomputed token counts once.
        recomputed_token_share: over all tokens computed.
        discarded_token_share: discarded tokens over all computed tokens.
        checkpointed_token_share, restored_token_share: tokens whose KV was copied to host memory, and back,
            over all tokens computed.
        scheduling_time_share: CPU time of planning and committing over the workload's duration.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    ttft_attainment: float
    tpot_attainment: float
    itl_attainment: float
    attainment: float
    goodput_rps: float
    normalized_latency_s: float
    total_tok_s: float
    online_tok_s: float
    offline_tok_s: float
    offline_rps: float
    recomputed_token_share: float
    discarded_token_share: float
    checkpointed_token_share: float
    restored_token_share: float
    num_preemptions: int
    scheduling_time_share: float
    num_online: int
    num_steps: int
    num_stopped_steps: int


def metrics_of(result: ReplayResult, slo: SLO) -> PolicyMetrics:
    """Percentiles are over all online requests and gaps, interpolated linearly."""
    ttfts = np.array([record.ttft_s for record in result.online])
    tpots = np.array([record.tpot_s for record in result.online])
    normalized = np.array([record.normalized_latency_s for record in result.online])
    gaps = np.array([gap for record in result.online for gap in record.gaps_s()])
    met_ttft, met_tpot = ttfts <= slo.ttft_s, tpots <= slo.tpot_s
    met_both = met_ttft & met_tpot
    online, offline = result.counters[ServiceClass.ONLINE], result.counters[ServiceClass.OFFLINE]
    useful = [counters.num_computed_tokens - counters.num_recomputed_tokens for counters in (online, offline)]
    computed = online.num_computed_tokens + offline.num_computed_tokens
    recomputed = online.num_recomputed_tokens + offline.num_recomputed_tokens
    discarded = online.num_discarded_tokens + offline.num_discarded_tokens
    checkpointed = online.num_checkpointed_tokens + offline.num_checkpointed_tokens
    restored = online.num_restored_tokens + offline.num_restored_tokens
    return PolicyMetrics(
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        ttft_attainment=_share(met_ttft),
        tpot_attainment=_share(met_tpot),
        itl_attainment=_share(gaps <= slo.tpot_s),
        attainment=_share(met_both),
        goodput_rps=float(met_both.sum()) / result.duration_s,
        normalized_latency_s=float(normalized.mean()) if len(normalized) else 0.0,
        total_tok_s=sum(useful) / result.duration_s,
        online_tok_s=useful[0] / result.duration_s,
        offline_tok_s=useful[1] / result.duration_s,
        offline_rps=result.num_offline_completed / result.duration_s,
        recomputed_token_share=recomputed / max(computed, 1),
        discarded_token_share=discarded / max(computed + discarded, 1),
        checkpointed_token_share=checkpointed / max(computed, 1),
        restored_token_share=restored / max(computed, 1),
        num_preemptions=online.num_preemptions + offline.num_preemptions,
        scheduling_time_share=result.scheduling_s / result.duration_s,
        num_online=len(ttfts),
        num_steps=result.num_steps,
        num_stopped_steps=result.num_stopped_steps,
    )


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _share(met: np.ndarray) -> float:
    return float(met.mean()) if len(met) else 1.0
