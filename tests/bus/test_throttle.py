"""The throttle that holds transfers to the bandwidth of a bus."""

from __future__ import annotations

import heapq
import threading
from pathlib import Path

import pytest

from backfill.bus.file import BURST_S, BusFile, BusReservations
from backfill.bus.throttle import ROUND_BYTES, BusThrottle

RATE = float(1 << 26)  # bytes per second
MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus"


class SharedTime:
    """A clock that goes on when all threads sleep."""

    def __init__(self, num_threads: int) -> None:
        self.now_s = 1000.0
        self._num_awake = num_threads
        self._changed = threading.Condition()
        self._wakes: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self._changed:
            wakes_s = self.now_s + seconds
            heapq.heappush(self._wakes, wakes_s)
            self._num_awake -= 1
            self._advance()
            assert self._changed.wait_for(lambda: self.now_s >= wakes_s, timeout=30.0)

    def end(self) -> None:
        """A thread ends."""
        with self._changed:
            self._num_awake -= 1
            self._advance()

    def _advance(self) -> None:
        if self._num_awake == 0 and self._wakes:
            self.now_s = self._wakes[0]
            while self._wakes and self._wakes[0] <= self.now_s:
                heapq.heappop(self._wakes)
                self._num_awake += 1
            self._changed.notify_all()


def transferred(path: Path, *engines: tuple[float, int, int]) -> list[float]:
    """Seconds until the transfers of each engine, of a share, bytes and ranks, are over.

    All begin together. Each rank transfers its part of the bytes.
    """
    transfers = [
        (engine, share, num_bytes // num_ranks, num_ranks)
        for engine, (share, num_bytes, num_ranks) in enumerate(engines)
        for _ in range(num_ranks)
    ]
    shared = SharedTime(len(transfers))
    ended_s = [0.0] * len(engines)

    def run(index: int) -> None:
        engine, _, num_bytes, _ = transfers[index]
        throttles[index].transfer(num_bytes, lambda start, stop: None)
        ended_s[engine] = max(ended_s[engine], shared.now_s)
        shared.end()

    places = [BusFile(path, RATE, clock=shared.clock) for _ in engines]
    files: list[BusReservations] = []
    throttles = []
    for engine, share, _, num_ranks in transfers:
        is_rank = num_ranks > 1
        files.append(BusReservations(path, RATE, clock=shared.clock) if is_rank else places[engine])
        throttles.append(
            BusThrottle(files[-1], share, num_ranks=num_ranks, clock=shared.clock, sleep=shared.sleep)
        )
    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(transfers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for throttle, (_, _, num_bytes, _) in zip(throttles, transfers, strict=True):
        assert throttle.num_bytes == num_bytes
    for file in {*files, *places}:
        file.close()
    return [each - 1000.0 for each in ended_s]


def test_a_transfer_takes_its_bytes_over_the_bandwidth(path: Path) -> None:
    (took_s,) = transferred(path, (1.0, 16 * MIB, 1))
    assert took_s == pytest.approx(16 * MIB / RATE - BURST_S)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equal_transfers_share_a_bus_equally(path: Path, num_ranks: int) -> None:
    """Of an engine with some ranks, and of one without."""
    took_s = transferred(path, (0.5, 16 * MIB, num_ranks), (0.5, 16 * MIB, 1))
    assert max(took_s) == pytest.approx(32 * MIB / RATE - BURST_S)
    assert max(took_s) - min(took_s) <= ROUND_BYTES / RATE  # the last one's last two chunks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_bus_is_shared_as_the_shares_are(path: Path, num_ranks: int) -> None:
    quarter_s, rest_s = transferred(path, (0.25, 16 * MIB, num_ranks), (0.75, 64 * MIB, 1))
    assert quarter_s == pytest.approx(64 * MIB / RATE, rel=0.1)
    assert rest_s == pytest.approx(80 * MIB / RATE - BURST_S)  # what the other one leaves is used


def test_a_transfer_is_done_in_chunks_and_its_work_counts_as_its_time(path: Path) -> None:
    shared = SharedTime(1)
    file = BusFile(path, RATE, clock=shared.clock)
    throttle = BusThrottle(file, 0.5, clock=shared.clock, sleep=shared.sleep)
    parts = []

    def work(start: int, stop: int) -> None:
        parts.append((start, stop))
        shared.sleep(0.001)

    throttle.transfer(2 * MIB + 5000, work)
    assert parts == [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 2 * MIB + 5000)]
    took_s = (2 * MIB + 5000) / RATE - BURST_S
    assert shared.now_s == pytest.approx(1000.0 + took_s, abs=0.001)
    assert throttle.wait_s == pytest.approx(took_s - 0.003, abs=0.001)
    assert throttle.num_bytes == 2 * MIB + 5000
    file.close()


def test_the_least_turn_of_an_engine_is_that_of_all_its_ranks(path: Path) -> None:
    """An engine with a small share would else have a larger one the more ranks it has."""
    took_s = transferred(path, (0.02, 2 * MIB, 8), (0.98, 64 * MIB, 1))
    assert took_s[0] == pytest.approx(66 * MIB / RATE, rel=0.1)


@pytest.mark.parametrize("num_ranks", [1, 3, 1000])
@pytest.mark.parametrize("share", [0.0, 0.123, 1.0])
def test_chunks_are_whole_pages(path: Path, share: float, num_ranks: int) -> None:
    file = BusFile(path, 1e12)
    stops: list[int] = []
    throttle = BusThrottle(file, share, num_ranks=num_ranks)
    throttle.transfer(3 * MIB, lambda start, stop: stops.append(stop))
    assert stops == sorted(stops)
    assert stops[-1] == 3 * MIB
    assert len(stops) > 1
    assert all(stop % 4096 == 0 for stop in stops)
    file.close()


def test_a_thread_that_wakes_up_late_costs_no_bandwidth(path: Path) -> None:
    shared = SharedTime(1)
    file = BusFile(path, RATE, clock=shared.clock)
    throttle = BusThrottle(
        file, 1.0, clock=shared.clock, sleep=lambda seconds: shared.sleep(seconds + 0.75 * ROUND_BYTES / RATE)
    )
    throttle.transfer(16 * MIB, lambda start, stop: None)
    assert shared.now_s - 1000.0 <= (16 * MIB + ROUND_BYTES) / RATE
    file.close()


def test_a_transfer_that_fails_waits_for_nothing(path: Path) -> None:
    file = BusFile(path, RATE)
    throttle = BusThrottle(file, 1.0)

    def work(start: int, stop: int) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        throttle.transfer(MIB, work)
    assert throttle.num_bytes == 0
    file.close()
