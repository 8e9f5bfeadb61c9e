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
        source = drawn_conversations(4 * count, max_len, rng)
    else:
        source = within_context(read_trace(trace), max_len)
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
        trace = within_context(read_trace(path), max_len)
        order = rng.permutation(len(trace))[:count]
        inputs, outputs = trace.input_lens[order], trace.output_lens[order]
    return tuple(Lengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True))


def trace_workload(
    path: Path,
    *,
    offline: tuple[Lengths, ...],
    max_len: int,
    rate_per_s: float | None,
    duration_s: float | None,
    seed: int,
) -> tuple[Workload, int]:
    """The online requests of a trace, in its order and with its lengths.

    Args:
        max_len: context of the model; longer requests are left out.
        rate_per_s: mean rate, to which the trace's times are stretched; None for its own. A trace without
            times gets Poisson arrivals at this rate, its requests in random order.
        duration_s: the part of the trace to use, after stretching; None for all of it.

    Returns: the workload, and how many requests of the trace are too long.
    Raises: ConfigError for a trace without times or a rate, or one that is too short.
    """
    everything = read_trace(path)
    trace = within_context(everything, max_len)
    if not len(trace):
        raise ConfigError(f"{path}: no request fits a context of {max_len} tokens.")
    if trace.arrivals_at_s is None:
        if rate_per_s is None:
            raise ConfigError(f"is needed: {path} has no arrival times.", field="rate")
        rng = np.random.default_rng(seed)
        count = len(trace) if duration_s is None else max(1, round(rate_per_s * duration_s))
        trace = trace.select(rng.choice(len(trace), count, replace=count > len(trace)).tolist())
        instants = gamma_arrivals(count, rate_per_s, 1.0, rng)
        lasts_s = count / rate_per_s
    else:
        lasts_s = float(trace.arrivals_at_s[-1])
        stretch = 1.0 if rate_per_s is None else len(trace) / lasts_s / rate_per_s if lasts_s else 1.0
        instants, lasts_s = trace.arrivals_at_s * stretch, lasts_s * stretch
        if duration_s is not None and duration_s > lasts_s:
            raise ConfigError(f"must be at most {lasts_s:g}: {path} lasts no longer.", field="duration")
    duration_s = duration_s or lasts_s
    if not duration_s > 0:
        raise ConfigError(f"{path}: all requests arrive at once; a trace must last longer than 0 s.")
    online = tuple(
        Arrival(float(at_s), Lengths(int(input_len), int(output_len)))
        for at_s, input_len, output_len in zip(instants, trace.input_lens, trace.output_lens, strict=True)
        if at_s <= duration_s
    )
    return Workload(online, duration_s, offline), len(everything) - len(within_context(everything, max_len))


def offline_lengths(path: Path, *, max_len: int, seed: int) -> tuple[Lengths, ...]:
    """The lengths of a batch, in random order; requests longer than ``max_len`` are left out.

    Raises: ConfigError if none is left.
    """
    trace = within_context(read_trace(path), max_len)
    if not len(trace):
        raise ConfigError(f"{path}: no request fits a context of {max_len} tokens.")
    trace = trace.select(np.random.default_rng(seed).permutation(len(trace)).tolist())
    return tuple(Lengths(int(i), int(o)) for i, o in zip(trace.input_lens, trace.output_lens, strict=True))


def drawn_conversations(count: int, max_len: int, rng: np.random.Generator) -> Trace:
    outputs = np.minimum(_CONVERSATION_OUTPUT.sample(count, rng), max_len // 2)
    inputs = np.minimum(_CONVERSATION_INPUT.sample(count, rng), max_len - outputs)
    return Trace(inputs, outputs, gamma_arrivals(count, 1.0, burstiness_of_cv(_CONVERSATION_CV), rng))


def within_context(trace: Trace, max_len: int) -> Trace:
    return trace.select(np.flatnonzero(trace.input_lens + trace.output_lens <= max_len).tolist())


def _equal_requests(instants: np.ndarray, lengths: Lengths) -> tuple[Arrival, ...]:
    return tuple(Arrival(float(at_s), lengths) for at_s in instants)
