"""The file that the engines on one bus share."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backfill.bus import file as bus_file
from backfill.bus.file import BURST_S, MAX_ENGINES, BusFile, BusReservations, BusUse, bus_path
from backfill.bus.throttle import ROUND_BYTES
from backfill.core.config import GIB
from backfill.core.errors import ConfigError
from backfill.offloading.coordinator import BusInstance
from tests.shared import examples

RATE = float(1 << 26)  # bytes per second
MIB = 1 << 20

ENGINE = """
import sys, time
from pathlib import Path
from backfill.bus.file import BusFile, BusUse
from backfill.bus.throttle import BusThrottle
from backfill.offloading.coordinator import BusInstance
bus = BusFile(Path(sys.argv[1]), float(sys.argv[2]))
bus.publish(BusUse(BusInstance(bus.name, 12, 4096, step_s=0.1)))
print(bus.name, flush=True)
assert "torch" not in sys.modules
sys.stdin.readline()
throttle = BusThrottle(bus, 0.5)
began_s = time.monotonic()
throttle.transfer(int(sys.argv[3]), lambda start, stop: None)
print(began_s, time.monotonic(), flush=True)
sys.stdin.readline()
"""


# A rank of an engine on the bus: as an engine, but it has no place of its own.
RANK = "\n".join(
    line.replace("BusFile", "BusReservations").replace("bus.name", "'rank'")
    for line in ENGINE.splitlines()
    if "publish" not in line
)


class Process:
    def __init__(self, path: Path, num_bytes: int = 0, program: str = ENGINE) -> None:
        command = [sys.executable, "-c", program, str(path), str(RATE), str(num_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")

    def end(self) -> None:
        """At the end of its program."""
        self._process.communicate("\n", timeout=60.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus"


def test_two_processes_together_do_not_exceed_the_bandwidth(path: Path) -> None:
    processes = [Process(path, num_bytes=6 * MIB) for _ in range(2)]
    try:
        assert {each.read() for each in processes} == {"00", "01"}
        for each in processes:
            each.go_on()
        times = [tuple(map(float, each.read().split())) for each in processes]
    finally:
        for each in processes:
            each.kill()
    together_s = max(end for _, end in times) - min(begin for begin, _ in times)
    assert together_s >= 12 * MIB / RATE - BURST_S
    for begin, end in times:
        assert end - begin >= 6 * MIB / RATE - BURST_S


def test_a_killed_engine_leaves_the_bus(path: Path) -> None:
    own = BusFile(path, RATE, clock=lambda: 0.0)  # so that it has no part in when the bus is free
    other = Process(path, num_bytes=1 << 40)  # would take hours
    assert other.read() == "01"
    assert [each.instance and each.instance.name for each in own.uses()] == [None, "01"]
    other.go_on()  # it transfers
    other.kill()
    assert own.uses() == [BusUse()]
    killed_s = time.monotonic()
    assert own.reserve(0) - killed_s <= ROUND_BYTES / RATE  # of the other one, two chunks are left
    successor = BusFile(path, RATE)
    assert successor.name == "01"
    assert own.uses() == [BusUse(), BusUse()]
    for each in (own, successor):
        each.close()


def test_ranks_are_held_to_the_bandwidth_and_take_no_place(path: Path) -> None:
    engine, other = (BusFile(path, RATE, clock=lambda: 5.0) for _ in range(2))
    ranks = [BusReservations(path, RATE, clock=lambda: 5.0) for _ in range(3)]
    ends_s = [each.reserve(MIB) for each in (engine, *ranks, other, *ranks)]
    assert ends_s == pytest.approx([5.0 - BURST_S + number * MIB / RATE for number in range(1, 9)])
    assert other.uses() == [BusUse(), BusUse()]
    for each in ranks:
        each.close()
    assert path.exists()
    last = BusReservations(path, RATE)
    for each in (other, engine):
        each.close()
    assert not path.exists(), "a rank that is still there keeps no bus"
    last.close()


def test_a_rank_that_is_killed_leaves_nothing_but_what_it_had_reserved(path: Path) -> None:
    engine = BusFile(path, RATE, clock=lambda: 0.0)  # so that it has no part in when the bus is free
    rank = Process(path, num_bytes=1 << 40, program=RANK)  # would take hours
    assert rank.read() == "rank"
    rank.go_on()  # it transfers
    rank.kill()
    killed_s = time.monotonic()
    assert engine.reserve(0) - killed_s <= ROUND_BYTES / RATE
    assert engine.uses() == [BusUse()]
    engine.close()


def test_a_rank_needs_a_bus_that_its_engine_is_on(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`offload_bus` cannot use .*bus: No such file"):
        BusReservations(path, RATE)
    path.write_bytes(b"of another")
    with pytest.raises(ConfigError, match=r"`offload_bus` .* is not of a bus of this release"):
        BusReservations(path, RATE)
    path.unlink()
    engine = BusFile(path, RATE)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="must be a file of this user that no other one can write"):
        BusReservations(path, RATE)
    engine.close()


def test_engines_see_what_the_others_say(path: Path) -> None:
    first, second = BusFile(path, RATE), BusFile(path, RATE)
    use = BusUse(BusInstance("00", 30, 7 << 20, 0.15, 0.001, 0.002, 2, 5), 1e6)
    before = second.generation
    first.publish(use)
    assert second.generation != before
    assert second.uses() == [use, BusUse()]
    first.close()
    assert second.uses() == [BusUse()]
    second.close()


@pytest.mark.parametrize("free_at_s", [math.nan, math.inf, 1e9])
def test_a_transfer_waits_for_no_instant_that_no_engine_can_have_reserved(
    path: Path, free_at_s: float
) -> None:
    bus = BusFile(path, RATE, clock=lambda: 100.0)
    with path.open("r+b") as file:
        file.seek(bus_file._FREE_AT_AT)
        file.write(struct.pack("=d", free_at_s))
    assert bus.reserve(MIB) == pytest.approx(100.0 - BURST_S + MIB / RATE)
    assert bus.reserve(MIB) == pytest.approx(100.0 - BURST_S + 2 * MIB / RATE)
    bus.close()


@pytest.mark.parametrize(
    "use",
    [
        {"copied_bytes_per_s": -1e9},
        {"instance": {"name": "01", "num_layers": 30, "layer_bytes": 1, "step_s": 0.1}},
        {"instance": {"name": "00", "num_layers": 10**9, "layer_bytes": 1, "step_s": 0.1}},
        {
            "instance": {"name": "00", "num_layers": 30, "layer_bytes": 1, "step_s": 0.1},
            "streamed_interval": 0,
        },
    ],
)
def test_what_no_engine_says_is_refused(path: Path, use: dict[str, Any]) -> None:
    bus = BusFile(path, RATE)
    text = msgspec.json.encode(use)
    with path.open("r+b") as file:
        file.seek(bus_file._offset(0))
        file.write(struct.pack("=I", len(text)) + text)
    with pytest.raises(msgspec.DecodeError):
        bus.uses()
    bus.close()


def test_a_file_that_others_can_write_is_no_bus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.touch()
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="must be a file of this user that no other one can write"):
        BusFile(path, RATE)
    path.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ConfigError, match="must be a file of this user"):
            BusFile(path, RATE)
    BusFile(path, RATE).close()


def test_engines_of_one_bus_agree_on_its_bandwidth(path: Path) -> None:
    first = BusFile(path, GIB / 2)
    with pytest.raises(ConfigError, match=r"`offload_bus_gib_per_s` must be 0\.5, as .* got 1\."):
        BusFile(path, float(GIB))
    first.close()
    BusFile(path, float(GIB)).close()  # nobody is on it


def test_the_last_engine_removes_the_file(path: Path) -> None:
    first, second = BusFile(path, RATE), BusFile(path, RATE)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_process_that_ends_removes_the_file_if_it_is_the_last_one(path: Path) -> None:
    ends = Process(path, num_bytes=1)
    assert ends.read() == "00"
    ends.go_on()
    ends.read()
    ends.end()
    assert not path.exists()


def test_a_file_of_others_at_the_same_path_stays(path: Path) -> None:
    first = BusFile(path, RATE)
    path.unlink()
    second = BusFile(path, RATE)
    first.close()
    assert path.exists()
    assert second.uses() == [BusUse()]
    second.close()


def test_an_engine_that_opens_a_file_while_it_is_removed_makes_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, open_file = BusFile(path, RATE), os.open

    def late(*args: Any) -> int:
        file = open_file(*args)
        monkeypatch.undo()
        last.close()
        return file

    monkeypatch.setattr(os, "open", late)
    first = BusFile(path, RATE)
    second = BusFile(path, RATE)
    assert (first.name, second.name) == ("00", "01")
    for each in (first, second):
        each.close()


def test_what_is_left_of_engines_before_a_restart_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = BusFile(path, RATE, clock=lambda: 1e9)  # the clock begins anew when the system does
    late.publish(BusUse(BusInstance("00", 30, 7 << 20, 0.15)))
    late.reserve(MIB)
    with monkeypatch.context() as killed:
        killed.setattr(os, "unlink", lambda _: None)
        late.close()
    later = BusFile(path, RATE, clock=lambda: 5.0)
    assert later.reserve(MIB) == pytest.approx(5.0 + MIB / RATE - BURST_S)
    assert later.uses() == [BusUse()]
    later.close()


def test_a_file_of_something_else_is_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"of another")
    with pytest.raises(
        ConfigError, match=r"`offload_bus` .* is there and is not of a bus; give another name"
    ):
        BusFile(path, RATE)
    assert path.read_bytes() == b"of another"
    path.write_bytes(b"")
    BusFile(path, RATE).close()


def test_all_of_the_file_has_memory(path: Path) -> None:
    file = BusFile(path, RATE)
    found = path.stat()
    assert found.st_blocks * 512 >= found.st_size > MAX_ENGINES * 1024
    file.close()


def test_a_file_without_room_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=r"`offload_bus` cannot use .*bus: No space left on device"):
        BusFile(path, RATE)
    monkeypatch.undo()
    BusFile(path, RATE).close()  # what is there is of a bus


def test_a_system_without_locks_of_open_files_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as changed:
        changed.setattr(fcntl, "fcntl", fail)
        with pytest.raises(ConfigError, match=r"`offload_bus` cannot use .*: Invalid"):
            BusFile(path, RATE)
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    with pytest.raises(ConfigError, match="`offload_bus` needs locks of open files"):
        BusFile(path, RATE)


@contextmanager
def held(path: Path, *locks: int) -> Iterator[None]:
    """As an engine that was stopped while it had these locks."""
    with path.open("r+b") as file:
        for lock in locks:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, lock, 1, 0))
        yield


def test_an_engine_that_is_stopped_does_not_stop_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = BusFile(path, RATE, clock=lambda: 5.0)
    with held(path, 0, 1):
        for _ in range(3):
            assert file.reserve(16 * MIB) == 5.0, "not held to the bandwidth"
            with pytest.raises(TimeoutError, match="holds a lock and is stopped"):
                file.publish(BusUse(None, 1.0))
            with pytest.raises(TimeoutError, match="holds a lock and is stopped"):
                file.uses()
        assert caplog.text.count("transfers are not held to the bandwidth of the bus") == 1
    assert file.uses() == [BusUse()]
    assert file.reserve(16 * MIB) == pytest.approx(5.0 + 16 * MIB / RATE - BURST_S)
    file.close()


def test_a_bus_whose_lock_is_kept_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_file, "_LOCK_TIMEOUT_AT_START_S", 0.0)
    path.touch()
    with (
        held(path, 1),
        pytest.raises(ConfigError, match=r"`offload_bus` cannot use .*: an engine on it holds"),
    ):
        BusFile(path, RATE)


def test_a_bus_has_a_limited_number_of_engines(path: Path) -> None:
    files = [BusFile(path, RATE) for _ in range(MAX_ENGINES)]
    with pytest.raises(ConfigError, match="has 64 engines already"):
        BusFile(path, RATE)
    for each in files:
        each.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "target"
    target.write_text("of another")
    link = tmp_path / "link"
    link.symlink_to(target)
    yield link
    assert target.read_text() == "of another"


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, link: Path) -> None:
    for path in (tmp_path / "no-folder" / "bus", tmp_path, link):
        with pytest.raises(ConfigError, match=r"`offload_bus` cannot use .*: "):
            BusFile(path, RATE)


def test_a_name_is_one_of_this_user_and_a_path_is_itself() -> None:
    assert str(bus_path("left")).startswith("/dev/shm/backfill-bus-")
    assert bus_path("left") != bus_path("right")
    assert bus_path("/run/bus") == Path("/run/bus")


NUMBERS = st.floats(width=64).map(lambda value: struct.pack("=d", value))
TEXTS = st.sampled_from([b'{"a":' + b"[" * 1010, b'{"copied_bytes_per_s":1e999}', b'{"instance":{}}', b"{}"])


@given(
    st.lists(
        st.tuples(st.integers(40, 3 * 1024), NUMBERS | st.binary(max_size=40))
        | TEXTS.map(lambda text: (64 + 1024, struct.pack("=I", len(text)) + text)),
        max_size=4,
    )
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_into_the_file_an_engine_goes_on(
    path: Path, writes: list[tuple[int, bytes]]
) -> None:
    """Other bytes than these say what the file is, and are read at the start alone."""
    bus, other = BusFile(path, RATE), BusFile(path, RATE)
    try:
        for at, data in writes:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(data)
            with suppress(msgspec.DecodeError):
                assert len(bus.uses()) <= 2
            ends_at_s = bus.reserve(1000)
            assert ends_at_s - time.monotonic() <= (1 << 30) / RATE + 1.0
        bus.publish(BusUse(copied_bytes_per_s=1.0))
    finally:
        other.close()
        bus.close()
