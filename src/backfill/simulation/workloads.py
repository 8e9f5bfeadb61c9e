"""Workloads of simulations: lengths and arrivals, from traces or drawn like the traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backfill.core.errors import ConfigError
from backfill.simulation.replay import Arrival, Lengths, Workload
from backfill.simulation.study import MOST_REQUESTS
from backfill.workloads.arrivals import burstiness_of_cv, gamma_arrivals
from backfill.workloads.lengths import LengthDistribution
from backfill.workloads.traces import Trace, read_trace


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Prompts and outputs drawn independently.

    An output is cut at half of the context and a prompt at what the output leaves.
    """

    prompt: LengthDistribution
    output: LengthDistribution

    def sample(self, count: int, max_len: int, rng: np.random.Generator) -> tuple[Lengths, ...]:
        prompts = self.prompt.sample(count, rng)
        outputs = np.minimum(self.output.sample(count, rng), max_len // 2)
        return lengths_of(np.minimum(prompts, max_len - outputs), outputs)


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Requests of a file, in random order. They repeat where the file has fewer than are asked for."""

    path: Path
    trace: Trace

    @classmethod
    def read(cls, path: Path) -> TraceLengths:
        """Raises: ConfigError when the file cannot be used."""
        return cls(path, read_trace(path))

    def sample(self, count: int | None, max_len: int, rng: np.random.Generator) -> tuple[Lengths, ...]:
        """Each request once where ``count`` is None. Raises: ConfigError if no request fits ``max_len``."""
        fitting = within_context(self.path, self.trace, max_len)
        order = rng.permutation(len(fitting))
        rows = order if count is None else np.resize(order, count)
        return lengths_of(fitting.input_lens[rows], fitting.output_lens[rows])


LengthSource = DrawnLengths | TraceLengths

# BROS, table 2: means and standard deviations.
SHAREGPT = DrawnLengths(
    LengthDistribution(223, 256.36 / 222.76, "lognormal"),
    LengthDistribution(235, 268.50 / 234.51, "lognormal"),
)
# Azure's code trace of 2023 has means of about 2,048 and 28 tokens. The variation is that of lognormal
# lengths with the medians that Splitwise (ISCA 2024, section III) reports for it: 1,500 and 13.
CODE = DrawnLengths(LengthDistribution(2048, 0.93, "lognormal"), LengthDistribution(28, 1.9, "lognormal"))
# Chosen, not measured: a question about a document of three quarters of a context of 4,096 tokens.
DOCUMENT = DrawnLengths(LengthDistribution(3000, 0.2, "normal"), LengthDistribution(100, 0.5, "lognormal"))
# Means and coefficients of variation of the published files' columns (docs/simulation.md).
SUMMARIES = DrawnLengths(LengthDistribution(2588, 0.37, "normal"), LengthDistribution(291, 1.0, "lognormal"))
_CONVERSATION_INPUT = LengthDistribution(1155, 0.96, "lognormal")
_CONVERSATION_OUTPUT = LengthDistribution(211, 0.77, "lognormal")
_CONVERSATION_CV = 1.09
_NUM_OFFLINE = 4000


def summarization_lengths(path: Path | None, max_len: int, seed: int) -> tuple[Lengths, ...]:
    """Lengths of a batch of document summaries in random order: of a file, or drawn. Raises: ConfigError."""
    source: LengthSource = SUMMARIES if path is None else TraceLengths.read(path)
    return source.sample(_NUM_OFFLINE, max_len, np.random.default_rng(seed))


def drawn_conversations(count: int, max_len: int, rng: np.random.Generator) -> Trace:
    outputs = np.minimum(_CONVERSATION_OUTPUT.sample(count, rng), max_len // 2)
    inputs = np.minimum(_CONVERSATION_INPUT.sample(count, rng), max_len - outputs)
    return Trace(inputs, outputs, gamma_arrivals(count, 1.0, burstiness_of_cv(_CONVERSATION_CV), rng))


def online_requests(
    rate_per_s: float, cv: float, lengths: Sequence[Lengths], rng: np.random.Generator
) -> tuple[Arrival, ...]:
    """Requests of these lengths with gamma-distributed gaps, over a time of their number by the rate."""
    instants = gamma_arrivals(len(lengths), rate_per_s, burstiness_of_cv(cv), rng)
    return arrivals_of(instants, lengths)


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
    trace = within_context(path, everything, max_len)
    num_too_long = len(everything) - len(trace)
    if trace.arrivals_at_s is None:
        if rate_per_s is None:
            raise ConfigError(f"is needed: {path} has no arrival times.", field="rate")
        rng = np.random.default_rng(seed)
        count = len(trace) if duration_s is None else num_requests(rate_per_s, duration_s)
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
    online = arrivals_of(instants, lengths_of(trace.input_lens, trace.output_lens))
    within = tuple(arrival for arrival in online if arrival.at_s <= duration_s)
    return Workload(within, duration_s, offline), num_too_long


def num_requests(rate_per_s: float, duration_s: float) -> int:
    """How many arrive in a time, at least one. Raises: ConfigError for more than a study may have."""
    most_s = MOST_REQUESTS / rate_per_s
    if duration_s > most_s:
        raise ConfigError(
            f"must be at most {most_s:g} at {rate_per_s:g} requests/s, got {duration_s:g}.", field="duration"
        )
    return max(1, round(rate_per_s * duration_s))


def within_context(path: Path, trace: Trace, max_len: int) -> Trace:
    """The requests of a trace that fit. Raises: ConfigError if none does."""
    fitting = trace.select(np.flatnonzero(trace.input_lens + trace.output_lens <= max_len).tolist())
    if not len(fitting):
        raise ConfigError(f"{path}: no request fits a context of {max_len} tokens.")
    return fitting


def lengths_of(inputs: np.ndarray, outputs: np.ndarray) -> tuple[Lengths, ...]:
    return tuple(Lengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True))


def arrivals_of(instants: np.ndarray, lengths: Sequence[Lengths]) -> tuple[Arrival, ...]:
    return tuple(Arrival(float(at_s), each) for at_s, each in zip(instants, lengths, strict=True))
