"""What the server's prefix cache did for a run, by the ``usage`` of its responses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from backfill.bench.record import RequestRecord


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The requests of one turn of all conversations.

    Attributes:
        turn: its number, from 1.
        median_ttft_s: seconds.
        cached_tokens: None if the server reports none.
    """

    turn: int
    num_completed: int
    median_ttft_s: float
    input_tokens: int
    cached_tokens: int | None

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens."""
        return _share(self.cached_tokens, self.input_tokens)


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Over completed requests.

    Attributes:
        input_tokens: prompt tokens.
        cached_tokens: prompt tokens that the server took from its cache; None if no response said.
        shared_tokens: the most that a cache could have had from this run's earlier requests; None if the
            dataset does not tell.
        foreign_tokens: cached tokens beyond that, so those of other clients or earlier runs; None if unknown.
        turns: of conversations; empty where no request had a second turn.
    """

    input_tokens: int
    cached_tokens: int | None
    shared_tokens: int | None
    foreign_tokens: int | None
    turns: tuple[TurnFigures, ...]

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens."""
        return _share(self.cached_tokens, self.input_tokens)

    @property
    def shared_rate(self) -> float | None:
        """The highest hit rate that the run itself allows."""
        return _share(self.shared_tokens, self.input_tokens)


def cache_figures(completed: Sequence[RequestRecord]) -> CacheFigures:
    """The figures of completed requests."""
    # vLLM leaves the count out of responses without a hit. If one response has it, the others had none.
    is_reported = any(record.cached_tokens is not None for record in completed)
    shared = [record.shared_tokens for record in completed if record.shared_tokens is not None]
    is_known = len(shared) == len(completed)
    foreign = None
    if is_reported and is_known:
        foreign = sum(
            max((record.cached_tokens or 0) - own, 0) for record, own in zip(completed, shared, strict=True)
        )
    return CacheFigures(
        input_tokens=sum(record.input_tokens for record in completed),
        cached_tokens=_cached_tokens(completed) if is_reported else None,
        shared_tokens=sum(shared) if is_known else None,
        foreign_tokens=foreign,
        turns=_turns(completed, is_reported),
    )


def _turns(completed: Sequence[RequestRecord], is_reported: bool) -> tuple[TurnFigures, ...]:
    by_turn: dict[int, list[RequestRecord]] = {}
    for record in completed:
        by_turn.setdefault(record.turn, []).append(record)
    if max(by_turn, default=1) == 1:
        return ()
    return tuple(
        TurnFigures(
            turn=turn,
            num_completed=len(records),
            median_ttft_s=statistics.median(record.ttft_s for record in records),
            input_tokens=sum(record.input_tokens for record in records),
            cached_tokens=_cached_tokens(records) if is_reported else None,
        )
        for turn, records in sorted(by_turn.items())
    )


def _cached_tokens(records: Sequence[RequestRecord]) -> int:
    return sum(record.cached_tokens or 0 for record in records)


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or whole == 0 else part / whole
