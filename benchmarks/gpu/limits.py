"""What a GPU gives plain torch: memory bandwidth, matrix products, and copies to and from the host.

    python benchmarks/gpu/limits.py

The limits that the other figures are set against. Prints one JSON object as the last line.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from backfill.execution.host_memory import pin

_ROUNDS = 20
_GB = 1e9


def seconds(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Median seconds on the device, after three runs that do not count."""
    times = []
    for number in range(rounds + 3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        if number >= 3:
            times.append(began.elapsed_time(ended) / 1000.0)
    return sorted(times)[len(times) // 2]


def measure() -> dict[str, float]:
    """Bandwidths in GB/s, products in TFLOP/s."""
    source = torch.randn(1 << 31, dtype=torch.bfloat16, device="cuda")  # 4 GiB: far beyond the L2 cache
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source))
    read_s = seconds(lambda: torch.sum(source.view(torch.float32)))
    found = {"copy_gb_s": 2 * source.nbytes / copy_s / _GB, "read_gb_s": source.nbytes / read_s / _GB}
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found["matmul_8192_tflop_s"] = 2 * 8192**3 / seconds(lambda: a @ b) / 1e12
    # Decode's products: a batch of rows against weights that are read once.
    for rows in (1, 64, 256):
        weights = torch.randn(24, 14336, 4096, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
        product_s = seconds(lambda w=weights, x=x: [torch.nn.functional.linear(x, each) for each in w])
        found[f"linear_{rows}_rows_gb_s"] = weights.nbytes / product_s / _GB
    host = torch.empty(1 << 29, dtype=torch.bfloat16)
    pin(host)
    there = source[: host.numel()]
    found["to_device_gb_s"] = host.nbytes / seconds(lambda: there.copy_(host, non_blocking=True), 5) / _GB
    found["to_host_gb_s"] = host.nbytes / seconds(lambda: host.copy_(there, non_blocking=True), 5) / _GB
    found["both_ways_gb_s"] = _both_ways(source, host)
    return found


def _both_ways(device: torch.Tensor, host: torch.Tensor) -> float:
    """Total GB/s of a copy to the host beside one to the device."""
    other = torch.cuda.Stream()
    half = host.numel() // 2

    def copies() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            host[:half].copy_(device[:half], non_blocking=True)
        device[half : 2 * half].copy_(host[half:], non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)

    return host.nbytes / seconds(copies, 5) / _GB


def main() -> None:
    found = measure()
    for name, value in found.items():
        print(f"{name:24} {value:10.1f}")
    print(json.dumps({"benchmark": "gpu-limits", "device": torch.cuda.get_device_name(), **found}))


if __name__ == "__main__":
    main()
