"""Waiting for a word in shared memory without keeping a core busy: futexes on Linux, else short sleeps."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF
_FALLBACK_SLEEP_S = 0.0002


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _syscall_number() -> int | None:
    is_64_bit_linux = sys.platform == "linux" and sys.maxsize > 2**32 and sys.byteorder == "little"
    return _SYSCALLS.get(platform.machine()) if is_64_bit_linux else None


class Futex:
    """Sleeps on words of 64 bits of a mapping, of which the kernel compares the low 32.

    Args:
        memory: writable; not unmapped while this is in use.
    """

    def __init__(self, memory: memoryview) -> None:
        self._keeps_mapped = ctypes.c_char.from_buffer(memory)
        self._address = ctypes.addressof(self._keeps_mapped)
        self._number = _syscall_number()
        if self._number is not None:
            self._syscall = ctypes.CDLL(None).syscall
            self._syscall.argtypes = (
                ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
                ctypes.c_void_p, ctypes.c_uint32,
            )  # fmt: skip

    def wait(self, word: int, value: int, timeout_s: float) -> None:
        """Sleep while the word has this value, until it is woken, or without a reason."""
        if self._number is None:
            time.sleep(min(timeout_s, _FALLBACK_SLEEP_S))
            return
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        address = self._address + 8 * word
        self._syscall(
            self._number, address, _FUTEX_WAIT, value & 0xFFFFFFFF, ctypes.addressof(timeout), None, 0
        )

    def wake(self, word: int) -> None:
        if self._number is not None:
            self._syscall(self._number, self._address + 8 * word, _FUTEX_WAKE, _EVERYONE, None, None, 0)


_fence = threading.Lock()


def fence() -> None:
    """Order what was written before against what is written or read after, also on weakly ordered CPUs."""
    with _fence:
        pass


def is_running(pid: int) -> bool:
    """Whether a process has not ended. One that nobody has waited for yet has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except FileNotFoundError:
        return _exists(pid) if sys.platform != "linux" else False
    except (ProcessLookupError, PermissionError):
        return False
    return state not in (b"Z", b"X")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
