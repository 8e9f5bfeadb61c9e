"""Memory and processors that the machine, or its container, leaves to this process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.kernels.isa import ISA_VARIABLE, possible_isas

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # NVIDIA, WSL, AMD
_CGROUP = Path("/sys/fs/cgroup")
# Between two looks at what has never been stolen: one takes 45 us with 2 processors, and longer with more.
_RARELY_S = 10.0
# Between two looks else: what is taken is counted in ticks of 10 ms.
_LEAST_INTERVAL_S = 0.05
# Part of a step's time beyond which it counts as disturbed by what a hypervisor took of the mean processor.
_MOST_STOLEN = 0.025


def available_host_bytes() -> int | None:
    """Memory that this process can still use without swapping; None if unknown.

    The smaller of the machine's and the control group's (a container's limit).
    """
    limits = [limit for limit in (_machine_available_bytes(), _cgroup_available_bytes()) if limit is not None]
    return min(limits, default=None)


def check_host_pool_fits(*, host_kv_bytes: int, left_bytes: int | None) -> None:
    """Raise InsufficientMemory, with advice, if the host pool exceeds the memory left (None: unknown)."""
    if left_bytes is None or host_kv_bytes <= left_bytes:
        return
    advice = at_most("`host_kv_gib`", left_bytes) or "use `host_kv_gib` 0"
    raise InsufficientMemory(
        f"Not enough host memory: the KV pool of `host_kv_gib` needs {host_kv_bytes / GIB:.2f} GiB, and "
        f"{max(0, left_bytes) / GIB:.2f} GiB are left for it; {advice}."
    )


def at_most(option: str, num_bytes: int) -> str | None:
    """Advice; None below 0.01 GiB."""
    gib = num_bytes / GIB
    return f"use {option} {int(gib * 100) / 100:g} or less" if gib >= 0.01 else None


def available_processors() -> int:
    """Processors that this process may use: its affinity, or the control group's quota if smaller."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


def check_threads(config: EngineConfig) -> None:
    """Raises: ConfigError for more threads than this machine has processors, and than there are ranks.

    With ``executor`` ray they are other machines', which Ray knows.
    """
    if config.executor == "ray":
        return
    most = max(os.cpu_count() or 1, config.num_ranks)
    if config.threads is not None and config.threads > most:
        raise ConfigError(f"must be at most {most} here, got {config.threads}.", field="threads")


def check_device(config: EngineConfig) -> None:
    """Raises: ConfigError for ``device`` cuda where there can be none. Whether there is one, torch finds out.

    With ``executor`` ray it is another machine's.
    """
    if config.device != "cuda" or config.executor == "ray":
        return
    import importlib.metadata  # takes as long as all else that is asked before an engine starts

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # run from its sources: it finds out itself
        return
    if version.endswith("+cpu"):
        raise ConfigError(
            f"cuda: the torch that is installed, {version}, has no CUDA; use cpu.", field="device"
        )
    if not _may_have_driver():
        raise ConfigError("cuda: there is no driver of a GPU here; use cpu.", field="device")


def check_isa(config: EngineConfig) -> None:
    """Raises: ConfigError for a variant of the CPU kernels that is none, or that no processor here runs.

    With ``executor`` ray the processors are other machines', which refuse one that they lack.
    """
    isa = os.environ.get(ISA_VARIABLE, "")
    if not isa or not runs_on_cpu(config):
        return
    flags = None if config.executor == "ray" else proc_value("cpuinfo", "flags")
    possible = possible_isas(None if flags is None else flags.split())
    if isa not in possible:
        whose = "it may be" if flags is None else "this machine has"
        raise ConfigError(f"{ISA_VARIABLE}: {whose} {', '.join(possible)}, got {isa!r}.")


def runs_on_cpu(config: EngineConfig) -> bool:
    """Whether ``device`` is the CPU for certain, on this machine. Where it is False, torch finds out."""
    return config.device == "cpu" or (config.device == "auto" and not _may_have_driver())


def _may_have_driver() -> bool:
    """Whether torch might find a GPU; it looks for a driver in more places, so files of devices will do."""
    if any(Path(path).exists() for path in _GPU_DEVICES):
        return True
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def threads_of_rank(config: EngineConfig) -> int:
    """Threads of each process that has a part of the model: they share the CPU evenly."""
    return max(1, (config.threads or available_processors()) // config.num_ranks)


def proc_value(file: str, name: str) -> str | None:
    """The first value of that name in a file of /proc; None if there is none."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None


class OthersMeter:
    """Measures what other processes use of the processors, from its creation on.

    Args:
        own: processes that count as this one. They run until ``share`` was called.
    """

    def __init__(self, own: Sequence[int] = ()) -> None:
        self._own = own
        self._began = self._now()

    def share(self) -> float:
        """Until now, 0 to 1; 0 where the system does not say."""
        elapsed_s, busy_s, own_s = (now - began for now, began in zip(self._now(), self._began, strict=True))
        if elapsed_s <= 0.0:
            return 0.0
        return min(1.0, max(0.0, busy_s - own_s) / (elapsed_s * (os.cpu_count() or 1)))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of all processors at work, and of this process."""
        used = os.times()
        own_s = used.user + used.system + used.children_user + used.children_system
        own_s += sum(map(_used_seconds, self._own))
        seconds = _processor_seconds()
        if seconds is None:
            return used.elapsed, own_s, own_s
        user_s, nice_s, system_s, _idle_s, _waits_s, interrupts_s, soft_s, stolen_s = seconds
        return used.elapsed, user_s + nice_s + system_s + interrupts_s + soft_s + stolen_s, own_s


class StolenTime:
    """What a hypervisor takes of the processors for its other guests."""

    def __init__(self) -> None:
        self._taken_s, self._read_at_s = stolen_s(), time.monotonic()

    def take_s(self) -> float:
        """Seconds since the last call, of the mean processor; 0 where the system does not say.

        Of all processors together they come in steps of 10 ms, mostly.
        """
        now_s = time.monotonic()
        if not self._taken_s and now_s < self._read_at_s + _RARELY_S:  # a machine of its own
            return 0.0
        self._read_at_s = now_s
        before_s, self._taken_s = self._taken_s, stolen_s()
        return (self._taken_s - before_s) / (os.cpu_count() or 1)

    def disturbs(self, seconds: float) -> bool:
        """Whether a step of so many seconds that has just ended does not show how fast the machine is.

        What was taken since the last look counts over that time or the step, whichever is longer. A step less
        than 50 ms after a look counts as undisturbed, and what was taken of it in the next look.
        """
        since_s = time.monotonic() - self._read_at_s
        return since_s >= _LEAST_INTERVAL_S and self.take_s() > _MOST_STOLEN * max(seconds, since_s)


def stolen_s() -> float:
    """What a hypervisor has taken of all processors together until now; 0 where the system does not say."""
    seconds = _processor_seconds()
    return 0.0 if seconds is None else seconds[-1]


def _used_seconds(pid: int) -> float:
    """Of the processors, by all threads of a process; 0 where the system does not say."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()  # behind its name, which may have blanks
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _processor_seconds() -> list[float] | None:
    """The first eight columns of /proc/stat's first line, up to stolen time; None where there are none."""
    with suppress(OSError, ValueError), open("/proc/stat", encoding="utf-8") as file:
        columns = [int(each) / os.sysconf("SC_CLK_TCK") for each in file.readline().split()[1:9]]
        if len(columns) == 8:
            return columns
    return None


def _machine_available_bytes() -> int | None:
    kib = proc_value("meminfo", "MemAvailable:")
    return None if kib is None else int(kib.split()[0]) * 1024


def _cgroup_available_bytes() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # The page cache of files counts as used, but is freed on demand.
        reclaimable = int(stat.get("inactive_file", "0"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + reclaimable)
