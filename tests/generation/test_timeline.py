"""When tokens count as arrived, and what of a wait is the client's."""

from __future__ import annotations

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.engine.messages import TokenOutput
from backfill.generation.timeline import Deliveries, Observer, RequestRecord, Timeline, Wait

ARRIVED_AT_S = 10.0


class Waits(Observer):
    """What it was told."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []
        self.stalls_s: list[float] = []
        self.finished: list[RequestRecord] = []

    def on_token(self, service_class: ServiceClass) -> None:
        self.num_tokens += 1

    def on_first_token(self, service_class: ServiceClass, since_arrival_s: float, slo: SLO | None) -> None:
        self.ttfts_s.append(since_arrival_s)

    def on_next_token(self, service_class: ServiceClass, since_last_s: float, slo: SLO | None) -> None:
        self.gaps_s.append(since_last_s)

    def on_client_stalled(self, service_class: ServiceClass, seconds: float) -> None:
        self.stalls_s.append(seconds)

    def on_finished(self, record: RequestRecord) -> None:
        self.finished.append(record)


class Stream:
    """A request of several choices on its way to a client that may stall."""

    def __init__(self, num_choices: int = 1, stalled_before_s: float = 0.0) -> None:
        self.clock = VirtualClock(ARRIVED_AT_S)
        self.observer = Waits()
        self.stalled_s = stalled_before_s
        self.deliveries = Deliveries(lambda: self.stalled_s)
        self.timelines = [self._timeline(choice) for choice in range(num_choices)]

    def _timeline(self, choice: int) -> Timeline:
        request = Request(
            request_id=RequestId(str(choice)),
            prompt_token_ids=[5],
            sampling=SamplingParams(max_tokens=9),
            arrived_at_s=ARRIVED_AT_S,
        )
        timeline = Timeline(request, self.observer, self.clock)
        self.deliveries.add(choice, timeline)
        return timeline

    def make_token(self, choice: int = 0, **fields: object) -> None:
        self.timelines[choice].count_token(TokenOutput(RequestId(str(choice)), 7, **fields))  # type: ignore[arg-type]

    def stall(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.stalled_s += seconds


def test_a_token_arrives_when_it_is_written_and_not_when_it_is_made() -> None:
    stream = Stream()
    stream.make_token()
    stream.clock.advance(0.5)
    assert stream.observer.ttfts_s == []
    assert stream.deliveries.wait(0) == Wait(0.5, True)
    assert stream.deliveries.written(0) == Wait(0.5, True)
    stream.make_token()
    stream.clock.advance(0.25)
    assert stream.deliveries.wait(0) == Wait(0.25, False)
    assert stream.deliveries.written(0) == Wait(0.25, False)
    assert (stream.observer.ttfts_s, stream.observer.gaps_s) == ([0.5], [0.25])


def test_tokens_written_together_arrive_once() -> None:
    stream = Stream()
    for num_tokens in (1, 3, 2):
        for _ in range(num_tokens):
            stream.make_token()
        stream.clock.advance(0.5)
        stream.deliveries.written(0)
    assert stream.observer.num_tokens == 6
    assert stream.observer.gaps_s == [0.5, 0.5]


def test_choices_have_gaps_of_their_own() -> None:
    stream = Stream(num_choices=2)
    for choice in (0, 1, 1, 0):
        stream.clock.advance(0.5)
        stream.make_token(choice)
        stream.deliveries.written(choice)
    assert stream.observer.ttfts_s == [0.5, 1.0]
    assert stream.observer.gaps_s == [0.5, 1.5]


def test_what_the_client_did_not_read_is_not_the_servers_wait() -> None:
    stream = Stream(stalled_before_s=100.0)
    stream.stall(2.0)
    stream.clock.advance(0.5)
    stream.deliveries.written(0)
    stream.clock.advance(0.25)
    stream.stall(4.0)
    stream.clock.advance(0.25)
    stream.deliveries.written(0)
    stream.clock.advance(0.125)
    stream.deliveries.written(0)
    assert stream.observer.ttfts_s == [0.5]
    assert stream.observer.gaps_s == [0.5, 0.125]
    stream.stall(8.0)
    stream.deliveries.close()
    assert stream.observer.stalls_s == [2.0, 4.0, 8.0]
    (record,) = stream.observer.finished
    assert record.client_stalled_s == 4.0, "between its first and last token"
    assert record.last_token_at_s is not None and record.first_token_at_s is not None
    assert record.last_token_at_s - record.first_token_at_s == 4.625


def test_a_stall_counts_once_for_all_choices() -> None:
    stream = Stream(num_choices=2)
    stream.stall(2.0)
    for choice in (0, 1, 0):
        stream.deliveries.written(choice)
    stream.deliveries.close()
    assert stream.observer.stalls_s == [2.0]


def test_a_request_finishes_once_when_nothing_more_is_written() -> None:
    stream = Stream(num_choices=2)
    stream.make_token(0, num_preemptions=1, num_cached_tokens=3)
    stream.deliveries.written(0)
    stream.make_token(0, num_preemptions=2)
    stream.make_token(0, num_preemptions=2, finish_reason=FinishReason.STOP)
    stream.clock.advance(1.0)
    for _ in range(2):
        stream.deliveries.close()
    first, second = stream.observer.finished
    assert (first.num_output_tokens, first.num_preemptions, first.num_cached_tokens) == (3, 2, 0)
    assert second.first_token_at_s is None
    assert first.finished_at_s == second.finished_at_s == ARRIVED_AT_S + 1.0


def test_without_deliveries_a_token_arrives_at_once() -> None:
    stream = Stream()
    (timeline,) = stream.timelines
    stream.clock.advance(0.5)
    assert timeline.arrive() == Wait(0.5, True)
    stream.clock.advance(0.25)
    assert timeline.arrive().seconds == pytest.approx(0.25)
