"""Workloads of the simulated experiments, from traces or drawn with the traces' means and variation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backfill.core.errors import ConfigError
from backfill.simulation.replay import Arrival, Lengths, Workload
from backfill.workloads.arrivals import Phase, burstiness_of_cv, gamma_arrivals, phased_arrivals, reshaped
from backfill.workloads.lengths import LengthDistribution
from backfill.workloads.traces import Trace, read_trace

# Means and coefficients of variation of the published files' columns (docs/simulation.md).
_CONVERSATION_INPUT = LengthDistribution(1155, 0.96, "lognormal")
_CONVERSATION_OUTPUT = LengthDistribution(211, 0.77, "lognormal")
_CONVERSATION_CV = 1.09
_SUMMARIZATION_INPUT = LengthDistribution(2588, 0.37, "normal")
_SUMMARIZATION_OUTPUT = LengthDistribution(291, 1.0, "lognormal")


def conversation_workload(
    rate_per_s: float,
    phases: Sequence[Phase],
    *,
    trace: Path | None,
    offline: tuple[Lengths, ...],
    max_len: int,
    seed: int,
) -> Workload:
    """A conversation trace, sampled to a rate and reshaped to phases (ConServe, section 6.1).

    Args:
        rate_per_s: mean over the duration of the phases; only the ratios of the phases' rates matter.
        max_len: context of the model; longer requests are left out.
    Raises: ConfigError for a trace without times or with too few requests.
    """
    rng = np.random.default_rng(seed)
    duration_s = sum(phase.duration_s for phase in phases)
    count = round(rate_per_s * duration_s)
    if trace is None:
        source = _drawn_conversations(4 * count, max_len, rng)
    else:
        source = _within_context(read_trace(trace), max_len)
    if source.arrivals_at_s is None:
        raise ConfigError(f"{trace} has no arrival times; a conversation trace needs them.")
    if len(source) < count:
        raise ConfigError(f"{trace} has {len(source)} requests that fit the model; {count} are needed.")
    sample = source.select(np.sort(rng.choice(len(source), count, replace=False)).tolist())
    assert sample.arrivals_at_s is not None
    instants = reshaped(sample.arrivals_at_s, phases)
    online = tuple(
        Arrival(float(at_s), Lengths(int(input_len), int(output_len)))
        for at_s, input_len, output_len in zip(instants, sample.input_lens, sample.output_lens, strict=True)
    )
    return Workload(online, duration_s, offline)


def phased_workload(
    phases: Sequence[Phase], lengths: Lengths, *, offline: tuple[Lengths, ...], seed: int
) -> Workload:
    """Requests of equal lengths in ON and OFF phases (ConServe, section 6.3.1)."""
    count = round(sum(phase.duration_s * phase.rate_per_s for phase in phases))
    instants = phased_arrivals(count, phases, 1.0, np.random.default_rng(seed))
    return Workload(_equal_requests(instants, lengths), sum(phase.duration_s for phase in phases), offline)


def gamma_workload(
    rate_per_s: float,
    cv: float,
    duration_s: float,
    lengths: Lengths,
    *,
    offline: tuple[Lengths, ...],
    seed: int,
) -> Workload:
    """Requests of equal lengths with gamma-distributed gaps (ConServe, section 6.3.2)."""
    count = max(1, round(rate_per_s * duration_s))
    instants = gamma_arrivals(count, rate_per_s, burstiness_of_cv(cv), np.random.default_rng(seed))
    return Workload(_equal_requests(instants, lengths), duration_s, offline)


def summarization_lengths(path: Path | None, *, count: int, max_len: int, seed: int) -> tuple[Lengths, ...]:
    """Lengths of a batch of document summaries, in random order."""
    rng = np.random.default_rng(seed)
    if path is None:
        inputs = _SUMMARIZATION_INPUT.sample(count, rng)
        outputs = _SUMMARIZATION_OUTPUT.sample(count, rng)
        outputs = np.minimum(outputs, max_len // 2)
        inputs = np.minimum(inputs, max_len - outputs)
    else:
        trace = _within_context(read_trace(path), max_len)
        order = rng.permutation(len(trace))[:count]
        inputs, outputs = trace.input_lens[order], trace.output_lens[order]
    return tuple(Lengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True))


def _drawn_conversations(count: int, max_len: int, rng: np.random.Generator) -> Trace:
    outputs = np.minimum(_CONVERSATION_OUTPUT.sample(count, rng), max_len // 2)
    inputs = np.minimum(_CONVERSATION_INPUT.sample(count, rng), max_len - outputs)
    return Trace(inputs, outputs, gamma_arrivals(count, 1.0, burstiness_of_cv(_CONVERSATION_CV), rng))


def _within_context(trace: Trace, max_len: int) -> Trace:
    return trace.select(np.flatnonzero(trace.input_lens + trace.output_lens <= max_len).tolist())


def _equal_requests(instants: np.ndarray, lengths: Lengths) -> tuple[Arrival, ...]:
    return tuple(Arrival(float(at_s), lengths) for at_s in instants)
