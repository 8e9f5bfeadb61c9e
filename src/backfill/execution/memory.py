"""How much memory there is, and refusing what does not fit before taking it."""

from __future__ import annotations

from pathlib import Path

import torch

from backfill.core.config import GIB
from backfill.core.errors import InsufficientMemory

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """Memory this process can still take without swapping; None where the system does not say.

    The smaller of the machine's and the control group's (a container's limit).
    """
    limits = [limit for limit in (_machine_available_bytes(), _cgroup_available_bytes()) if limit is not None]
    return min(limits, default=None)


def check_fits(*, weights_bytes: int, kv_bytes: int, available_bytes: int | None, device: str) -> None:
    """Raise InsufficientMemory, saying what would fit, if weights and KV pool exceed what is available."""
    if available_bytes is None or weights_bytes + kv_bytes <= available_bytes:
        return
    most_kv_gib = (available_bytes - weights_bytes) / GIB
    advice = (
        f"use --kv-gib {int(most_kv_gib * 100) / 100:g} or less"
        if most_kv_gib >= 0.01
        else "the weights alone do not fit; use a smaller model"
    )
    raise InsufficientMemory(
        f"Not enough memory on {device}: the weights need {weights_bytes / GIB:.2f} GiB and the KV pool "
        f"{kv_bytes / GIB:.2f} GiB, and {available_bytes / GIB:.2f} GiB are available; {advice}."
    )


def available_cuda_bytes(device: torch.device, utilization: float) -> int:
    """Bytes of the device this process may still take when ``utilization`` of it is ours."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def _machine_available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available_bytes() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
