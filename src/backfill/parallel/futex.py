"""Waiting for a word in shared memory without keeping a core busy: futexes on Linux, else short sleeps."""

from __future__ import annotations

import ctypes
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


_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Order what was read and written before against what is read and written after, on every CPU.

    One lock alone does not: what precedes it may move behind its acquisition, and what follows before its
    release, and so past each other. A release is never reordered with an acquisition after it (on x86 each is
    a locked instruction; of ARM's STLR and LDAR its memory model says so). So two locks in a row are a fence.
    """
    with _first:
        pass
    with _second:
        pass
