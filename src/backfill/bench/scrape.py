"""Totals that a server exposes at ``/metrics``, sampled during a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})? (\S+)(?: \d+)?$")

# Prompt and output tokens served so far, as a signed sum of counters, of which the first must be there. Our
# counters count the tokens that steps compute. Recomputed tokens are subtracted. A request's last token is
# never computed, so one token is added for each first token.
_TOKENS: tuple[tuple[tuple[str, int], ...], ...] = (
    (
        ("backfill:iteration_tokens_total_sum", 1),
        ("backfill:recomputed_tokens_total", -1),
        ("backfill:time_to_first_token_seconds_count", 1),
    ),
    (("vllm:prompt_tokens_total", 1), ("vllm:generation_tokens_total", 1)),
)
_COMPUTED = "backfill:iteration_tokens_total_sum"
_DISCARDED = "backfill:discarded_tokens_total"
STEP_STOPS = "backfill:step_stops_total"
PREEMPTIONS = "backfill:num_preemptions_total"
PREFIX_HITS = ("backfill:prefix_cache_hits_total", "vllm:prefix_cache_hits_total")
_PRESENT = (
    ("backfill:num_requests_running", "backfill:num_requests_waiting"),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
)


class Sample(NamedTuple):
    """The server's totals at one time, in seconds from the start of the run, summed over labels."""

    at_s: float
    totals: Mapping[str, float]


def parse_totals(text: str) -> dict[str, float]:
    """The sum of each name's samples in Prometheus text, without histogram buckets."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match[1].endswith("_bucket"):
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        totals[match[1]] = totals.get(match[1], 0.0) + value
    return totals


def num_present(totals: Mapping[str, float]) -> float | None:
    """Requests that run or wait; None if the server does not say."""
    for names in _PRESENT:
        if names[0] in totals:
            return sum(totals.get(name, 0.0) for name in names)
    return None


def total_tokens(totals: Mapping[str, float]) -> float | None:
    """Tokens of prompts and outputs served so far, of both classes; None if the server does not say."""
    for terms in _TOKENS:
        if terms[0][0] in totals:
            return sum(sign * totals.get(name, 0.0) for name, sign in terms)
    return None


def gained(samples: Sequence[Sample], *names: str) -> float | None:
    """Increase of a counter from the first sample to the last, under the first of its names that is exposed.

    None if the last sample lacks the counter, or if it fell: a restarted engine begins at 0.
    """
    name = next((name for name in names if samples and name in samples[-1].totals), None)
    if len(samples) < 2 or name is None:
        return None
    gain = samples[-1].totals[name] - samples[0].totals.get(name, 0.0)
    return gain if gain >= 0 else None


def computed_share(samples: Sequence[Sample], name: str) -> float | None:
    """Increase of a counter of tokens over all tokens computed."""
    return _share(gained(samples, name), gained(samples, _COMPUTED))


def discarded_share(samples: Sequence[Sample]) -> float | None:
    """Discarded tokens over these and all computed tokens."""
    discarded, computed = gained(samples, _DISCARDED), gained(samples, _COMPUTED)
    return _share(discarded, None if discarded is None or computed is None else discarded + computed)


def tokens_at(samples: Sequence[Sample], instants_s: Sequence[float]) -> list[float] | None:
    """Tokens served up to each time, interpolated linearly between samples.

    None without two samples that have the count, or if the count fell.
    """
    counted = [(at_s, tokens) for at_s, totals in samples if (tokens := total_tokens(totals)) is not None]
    if len(counted) < 2 or any(after < before for (_, before), (_, after) in itertools.pairwise(counted)):
        return None
    at_s, served = zip(*counted, strict=True)
    found: list[float] = np.interp(instants_s, at_s, served).tolist()
    return found


def _share(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None:
        return None
    return part / whole if whole > 0 else 0.0
