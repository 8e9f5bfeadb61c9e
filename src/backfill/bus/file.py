"""The file that the engines on one bus share: who is on it, what each needs, and until when it transfers.

It is mapped into memory and needs no server. Whatever a process holds of it are locks of the system, so a
process that is killed leaves nothing behind but, if it was the last one, the file.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import math
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from backfill.core.config import GIB
from backfill.core.errors import ConfigError
from backfill.offloading.coordinator import BusInstance

logger = logging.getLogger(__name__)

MAX_ENGINES = 64

# What an idle bus saves up: a thread that begins a transfer late by less costs no bandwidth.
BURST_S = 0.004

_KIND = b"backfill bus, version "
_MAGIC = _KIND + b"2\0"
_BANDWIDTH = struct.Struct("=d")
_FREE_AT = struct.Struct("=d")
_GENERATION = struct.Struct("=Q")
_LENGTH = struct.Struct("=I")
_BANDWIDTH_AT, _FREE_AT_AT, _GENERATION_AT, _SLOTS_AT = 32, 40, 48, 64
_SLOT_BYTES = 1024
_FILE_BYTES = _SLOTS_AT + MAX_ENGINES * _SLOT_BYTES

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LAYERS = 4096
# All engines together reserve less, chunk after chunk.
_MAX_RESERVED_BYTES = 1 << 30

# Bytes of the file that stand for what is locked; an engine also locks the first byte of its slot.
_TRANSFERS, _TABLE = 0, 1
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid

# A lock is held for microseconds. One that is not to be had for so long belongs to an engine that is stopped.
_LOCK_TIMEOUT_S = 0.05
_LOCK_TIMEOUT_AT_START_S = 1.0
_POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class BusUse:
    """What an engine says of itself.

    Attributes:
        instance: what its weights need; None while it has no work.
        copied_bytes_per_s: KV that it copies over the bus.
        streamed_interval: with which it transfers weights now, if what its memory holds can change. Until it
            has changed, that may be another one than the coordinator's.
    """

    instance: BusInstance | None = None
    copied_bytes_per_s: float = 0.0
    streamed_interval: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.copied_bytes_per_s < math.inf:
            raise ValueError(f"copies of some bytes per second are needed, got {self.copied_bytes_per_s}")
        if self.instance is not None and self.instance.num_layers > _MAX_LAYERS:
            raise ValueError(f"at most {_MAX_LAYERS} layers, got {self.instance.num_layers}")
        _ = self.streamed  # an interval that the instance cannot have is refused now

    @property
    def streamed(self) -> BusInstance | None:
        """What its weights need with the memory that it has."""
        if self.instance is None or self.streamed_interval is None:
            return self.instance
        interval = self.streamed_interval
        return replace(self.instance, min_interval=interval, max_interval=interval)


def bus_path(name: str) -> Path:
    """The file of a bus: the path itself if it has a slash, else one in shared memory, for this user."""
    if "/" in name:
        return Path(name).expanduser()
    return Path("/dev/shm") / f"backfill-bus-{os.getuid()}-{name}"


class BusReservations:
    """The transfers of all processes on a bus, as a process sees them that has some of its own.

    It is no engine of the bus, but belongs to one that is on it: a rank's process. Nothing is left of it when
    it ends. Calls may be made from any thread.

    Raises: ConfigError if there is no such bus.
    """

    def __init__(
        self, path: Path, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._thread_locks = {_TRANSFERS: threading.Lock(), _TABLE: threading.Lock()}
        self._is_stuck = {_TRANSFERS: False, _TABLE: False}  # the last try to get the lock ended in vain
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise ConfigError(
                "needs locks of open files, which Python does not have on this system.", field="offload_bus"
            )
        self._path = path
        self._open()

    def reserve(self, num_bytes: int, follows_s: float | None = None) -> float:
        """Transfer bytes after all that were reserved before. Returns: the instant at which they are over.

        A bucket of tokens as one instant: that at which all reserved transfers are over. While a process that
        is stopped has the lock, nothing is reserved and transfers are over at once.

        Args:
            follows_s: the end of the transfer that these bytes belong to, until now. A bus goes on then, also
                if the caller came later.
        """
        was_stuck = self._is_stuck[_TRANSFERS]
        try:
            with self._locked(_TRANSFERS):
                (free_at_s,) = _FREE_AT.unpack_from(self._memory, _FREE_AT_AT)
                now_s = self._clock()
                ready_s = now_s - BURST_S if follows_s is None else follows_s
                # Not what something else wrote into the file, NaN included: a transfer would wait for it.
                if not free_at_s - now_s <= _MAX_RESERVED_BYTES / self.bytes_per_s:
                    free_at_s = ready_s
                ends_at_s = max(float(free_at_s), ready_s) + num_bytes / self.bytes_per_s
                _FREE_AT.pack_into(self._memory, _FREE_AT_AT, ends_at_s)
            return ends_at_s
        except TimeoutError as error:
            if not was_stuck:
                logger.warning("transfers are not held to the bandwidth of the bus: %s", error)
            return self._clock()

    def close(self) -> None:
        """No other call may follow."""
        self._memory.close()
        os.close(self._file)

    def _open(self) -> None:
        path = self._path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._check_owner()
            if os.pread(self._file, len(_MAGIC), 0) != _MAGIC or os.fstat(self._file).st_size < _FILE_BYTES:
                raise ConfigError(f"{path} is not of a bus of this release.", field="offload_bus")
            self._memory = mmap.mmap(self._file, _FILE_BYTES)
        except BaseException:
            os.close(self._file)
            raise

    def _check_owner(self) -> None:
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            raise ConfigError(
                f"{self._path} must be a file of this user that no other one can write; give another name.",
                field="offload_bus",
            )

    @contextmanager
    def _locked(self, what: int, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
        """Raises: TimeoutError if another process keeps the lock; the next calls do not wait for it again."""
        with self._thread_locks[what]:  # threads of a process share its locks of the file
            gives_up_s = time.monotonic() + (0.0 if self._is_stuck[what] else timeout_s)
            while not self._lock(what, fcntl.F_WRLCK):
                if time.monotonic() >= gives_up_s:
                    self._is_stuck[what] = True
                    raise TimeoutError("an engine on it holds a lock and is stopped")
                time.sleep(_POLL_S)
            self._is_stuck[what] = False
            try:
                yield
            finally:
                self._lock(what, fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        """Whether the lock could be taken."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


class BusFile(BusReservations):
    """A bus that this engine is on, from its creation until it is closed or the process ends.

    The first engine on a bus sets its bandwidth. Locks are those of open files (OFD), so several objects of
    one process are several engines.

    Attributes:
        name: of this engine, for the others.
    Raises: ConfigError if the file cannot be used or is not of a bus, if the engines on the bus have another
        bandwidth, or if one of them is stopped and holds a lock.
    """

    @property
    def generation(self) -> int:
        """Changes when an engine says something new of itself. Not when one dies."""
        (generation,) = _GENERATION.unpack_from(self._memory, _GENERATION_AT)
        return int(generation)

    def publish(self, use: BusUse) -> None:
        """Say what this engine needs from now on.

        Raises: TimeoutError if an engine that is stopped has the lock.
        """
        with self._locked(_TABLE):
            self._write(use)

    def uses(self) -> list[BusUse]:
        """What the engines on the bus said last, without those that have ended.

        Raises: TimeoutError if an engine that is stopped has the lock; msgspec.DecodeError if something else
            wrote into the file.
        """
        with self._locked(_TABLE):
            texts = {slot: self._text(slot) for slot in range(MAX_ENGINES) if self._is_used(slot)}
        try:
            uses = {slot: msgspec.json.decode(text, type=BusUse) for slot, text in texts.items()}
        except RecursionError:
            raise msgspec.DecodeError("what an engine says is nested too deeply") from None
        for slot, use in uses.items():
            if use.instance is not None and use.instance.name != _name(slot):
                raise msgspec.DecodeError(f"the engine {_name(slot)} calls itself {use.instance.name!r:.80}")
        return list(uses.values())

    def close(self) -> None:
        """Leave the bus, and remove its file if nobody else is on it. No other call may follow."""
        atexit.unregister(self._remove_if_last)
        self._remove_if_last()
        super().close()

    def _open(self) -> None:
        while not self._joined():
            pass  # the file was removed after it was opened
        self.name = _name(self._slot)
        atexit.register(self._remove_if_last)

    def _joined(self) -> bool:
        """Open the file and claim a slot. Returns: False if the last engine has removed it meanwhile."""
        path = self._path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            with self._locked(_TABLE, _LOCK_TIMEOUT_AT_START_S):
                is_there = os.fstat(self._file).st_nlink > 0
                if is_there:
                    self._memory = self._mapped(path)
                    self._slot = self._claimed_slot(path)
        except TimeoutError as error:
            os.close(self._file)
            raise ConfigError(f"cannot use {path}: {error}.", field="offload_bus") from error
        except OSError as error:  # no memory for the file, or no locks of open files on its file system
            os.close(self._file)
            raise _unusable(path, error) from error
        except BaseException:
            os.close(self._file)
            raise
        if not is_there:
            os.close(self._file)
        return is_there

    def _remove_if_last(self) -> None:
        """Nothing is removed while an engine that is stopped has the lock."""
        with suppress(OSError), self._locked(_TABLE):
            is_last = not any(self._is_locked(slot) for slot in range(MAX_ENGINES))
            if is_last and os.path.samestat(os.lstat(self._path), os.fstat(self._file)):
                os.unlink(self._path)

    def _mapped(self, path: Path) -> mmap.mmap:
        self._check_owner()
        begins = os.pread(self._file, len(_KIND), 0)
        if begins not in (b"", _KIND):
            raise ConfigError(f"{path} is there and is not of a bus; give another name.", field="offload_bus")
        if not begins:  # before the rest, so that a start that is killed leaves no file that is refused
            os.pwrite(self._file, _MAGIC, 0)
        # Memory that is missing would end the process when it is first written.
        os.posix_fallocate(self._file, 0, _FILE_BYTES)
        return mmap.mmap(self._file, _FILE_BYTES)

    def _claimed_slot(self, path: Path) -> int:
        others = [slot for slot in range(MAX_ENGINES) if self._is_locked(slot)]
        if not others:  # also of a file that engines left behind before the system started again
            self._memory[: len(_MAGIC)] = _MAGIC
            _BANDWIDTH.pack_into(self._memory, _BANDWIDTH_AT, self.bytes_per_s)
            _FREE_AT.pack_into(self._memory, _FREE_AT_AT, 0.0)
        if self._memory[: len(_MAGIC)] != _MAGIC:
            raise ConfigError(f"{path} is used by another release of Backfill.", field="offload_bus")
        (bandwidth,) = _BANDWIDTH.unpack_from(self._memory, _BANDWIDTH_AT)
        if not math.isclose(bandwidth, self.bytes_per_s, rel_tol=1e-6):
            raise ConfigError(
                f"must be {bandwidth / GIB:g}, as of the engines that are on the bus {path}, got "
                f"{self.bytes_per_s / GIB:g}.",
                field="offload_bus_gib_per_s",
            )
        for slot in range(MAX_ENGINES):
            if slot not in others and self._lock(_offset(slot), fcntl.F_WRLCK):
                self._slot = slot
                self._write(BusUse())
                return slot
        raise ConfigError(f"{path} has {MAX_ENGINES} engines already, the most.", field="offload_bus")

    def _is_used(self, slot: int) -> bool:
        (length,) = _LENGTH.unpack_from(self._memory, _offset(slot))
        return length > 0 and (slot == self._slot or self._is_locked(slot))

    def _text(self, slot: int) -> bytes:
        start = _offset(slot) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._memory, _offset(slot))
        return self._memory[start : start + min(length, _SLOT_BYTES - _LENGTH.size)]

    def _write(self, use: BusUse) -> None:
        text, start = msgspec.json.encode(use), _offset(self._slot)
        assert _LENGTH.size + len(text) <= _SLOT_BYTES
        self._memory[start + _LENGTH.size : start + _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._memory, start, len(text))
        _GENERATION.pack_into(self._memory, _GENERATION_AT, (self.generation + 1) % (1 << 64))

    def _is_locked(self, slot: int) -> bool:
        """Whether another engine has the slot."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _offset(slot), 1, 0)
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _name(slot: int) -> str:
    return f"{slot:02}"


def _offset(slot: int) -> int:
    return _SLOTS_AT + slot * _SLOT_BYTES


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot use {path}: {error.strerror}.", field="offload_bus")
