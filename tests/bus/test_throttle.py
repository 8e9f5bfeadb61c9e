"""The throttle that holds transfers to the bandwidth of a bus."""

from __future__ import annotations

import heapq
import threading
from pathlib import Path

import pytest

from backfill.bus.file import BURST_S, BusFile
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


def transferred(path: Path, transfers: list[tuple[float, int]]) -> list[float]:
    """Seconds until each of these transfers, of a share and bytes, is over, if all begin together."""
    shared = SharedTime(len(transfers))
    ended_s = [0.0] * len(transfers)

    def run(index: int) -> None:
        throttle = throttles[index]
        throttle.transfer(transfers[index][1], lambda start, stop: None)
        ended_s[index] = shared.now_s
        shared.end()

    files = [BusFile(path, RATE, clock=shared.clock) for _ in transfers]
    throttles = [
        BusThrottle(file, share, clock=shared.clock, sleep=shared.sleep)
        for file, (share, _) in zip(files, transfers, strict=True)
    ]
    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(transfers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for file, throttle, (_, num_bytes) in zip(files, throttles, transfers, strict=True):
        assert throttle.num_bytes == num_bytes
        file.close()
    return [each - 1000.0 for each in ended_s]


def test_a_transfer_takes_its_bytes_over_the_bandwidth(path: Path) -> None:
    (took_s,) = transferred(path, [(1.0, 16 * MIB)])
    assert took_s == pytest.approx(16 * MIB / RATE - BURST_S)


def test_equal_transfers_share_a_bus_equally(path: Path) -> None:
    took_s = transferred(path, [(0.5, 16 * MIB)] * 2)
    assert max(took_s) == pytest.approx(32 * MIB / RATE - BURST_S)
    assert max(took_s) - min(took_s) <= ROUND_BYTES / RATE  # the last one's last two chunks


def test_a_bus_is_shared_as_the_shares_are(path: Path) -> None:
    quarter_s, rest_s = transferred(path, [(0.25, 16 * MIB), (0.75, 64 * MIB)])
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


@pytest.mark.parametrize("share", [0.0, 0.123, 1.0])
def test_chunks_are_whole_pages(path: Path, share: float) -> None:
    file = BusFile(path, 1e12)
    stops: list[int] = []
    BusThrottle(file, share).transfer(3 * MIB, lambda start, stop: stops.append(stop))
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
