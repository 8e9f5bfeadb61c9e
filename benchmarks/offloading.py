"""Memory and step times of a model with offloaded layers, at several intervals, on a CPU.

Each interval runs in a process of its own, decodes only. Reported for each:

- memory of the process as the system counts it: anonymous pages (weights, KV, activations, the interpreter's
  own) and file pages (libraries; a model's file while it is mapped), now and at the peak; and how much of the
  packed file is in the page cache, which is not the process's;
- the step, the part of it in which layers waited for weights, and the mean step that ``step_time_s`` predicts
  from the computation of a layer without offloading and from a transfer alone.

A transfer and the computation beside it share the processors and the memory, which a prediction from both
alone leaves out: the step is longer by that. A disk's transfers also vary from run to run. ``--gib-per-s``
holds them to a bandwidth (``--offload-bus``), which the prediction then counts with.

Usage: offloading.py [--intervals none,4,2,1] [--batch 16] [--context 128] [--steps 60] [--gib-per-s 1]. The
last line is a JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from in_process import restart_in_engine_environment

from backfill.bus.throttle import open_bus
from backfill.core.clock import WallClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.resolve import cache_root, resolve_model
from backfill.offloading.interval import LayerTimes, step_time_s

_MIB = 1 << 20
_PAGE = mmap.PAGESIZE


def memory_mib(pid: str = "self") -> dict[str, float]:
    """Resident, anonymous and file pages of a process, and its peak."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:]}
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {
        "rss": kib["Rss"] / 1024,
        "anonymous": kib["Anonymous"] / 1024,
        "file": (kib["Rss"] - kib["Anonymous"]) / 1024,
        "peak_rss": peak / 1024,
    }


def cached_mib(path: Path) -> float:
    """How much of a file is in the page cache."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // _PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    length = ctypes.c_size_t(size)
    with path.open("rb") as file:
        address = ctypes.c_void_p(
            libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
        )
    if libc.mincore(address, length, pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    libc.munmap(address, length)
    return sum(each & 1 for each in pages) * _PAGE / _MIB


class TimedModel:
    """A model that notes when a step's first layer begins and its last one ends."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_layers = model.num_layers
        self.layers_s: list[float] = []
        self._began_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed(self, *arguments: Any) -> Any:
        state = self._model.embed(*arguments)
        self._began_s = time.perf_counter()
        return state

    def run_layers(self, layers: range, *arguments: Any) -> Any:
        state = self._model.run_layers(layers, *arguments)
        if layers.stop == self.num_layers:
            self.layers_s.append(time.perf_counter() - self._began_s)
        return state


def transfer_s(executor: TorchExecutor, gib_per_s: float | None) -> float:
    """Time of a transfer, nothing else running: the median, or what the bandwidth says."""
    streamer = executor.streamer
    assert streamer is not None
    if gib_per_s is not None:
        return streamer.layer_bytes / (gib_per_s * GIB)
    packed = max(newest_packed(), key=lambda path: path.stat().st_atime)
    size = streamer._placed[0].buffer_bytes
    file = os.open(packed, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, size)
    times = []
    for index in range(3 * streamer._model.num_layers):
        began_s = time.perf_counter()
        os.preadv(file, [buffer], _PAGE + index % streamer._model.num_layers * size)
        times.append(time.perf_counter() - began_s)
    os.close(file)
    return statistics.median(times)


def newest_packed() -> list[Path]:
    return list((cache_root() / "packed").glob("*.layers"))


def measure(options: argparse.Namespace, interval: str) -> dict[str, Any]:
    config = EngineConfig(
        model_dir=str(resolve_model(options.model)),
        kv_gib=None if options.device_memory else options.kv_gib,
        device_memory=options.device_memory,
        offload_interval=interval,
        scheduler=SchedulerConfig(prefix_caching=False),
    )
    if options.gib_per_s and interval != "none":
        bus = str(Path(tempfile.mkdtemp()) / "bus")
        config = replace(config, offload_bus=bus, offload_bus_gib_per_s=options.gib_per_s)
    before = memory_mib()
    began_s = time.perf_counter()
    executor = create_torch_executor(config, open_bus(config))
    started_s = time.perf_counter() - began_s
    loaded = memory_mib()
    model = executor._model = TimedModel(executor._model)  # type: ignore[assignment]
    engine = Engine(config.scheduler, executor, WallClock())
    for index in range(options.batch):
        prompt = [3 + (7 * index + 11 * place) % 1000 for place in range(options.context)]
        sampling = SamplingParams(max_tokens=options.steps + 10, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling))
    if options.device_memory:
        executor.fill_kv_pool(executor.info.num_blocks)
    steps: list[float] = []
    stalls: list[float] = []
    num_bytes, stall_before = 0, 0.0
    while engine.has_unfinished:
        began_s = time.perf_counter()
        engine.step()
        step_s = time.perf_counter() - began_s
        stats = engine.stats()
        if stats.step.num_tokens == options.batch:
            steps.append(step_s)
            stalls.append(stats.weight_stall_s - stall_before)
        num_bytes, stall_before = stats.num_transferred_weight_bytes, stats.weight_stall_s
    layers_s = model.layers_s[-len(steps) :]
    return {
        "interval": interval, "start_s": started_s,
        "before": before, "loaded": loaded, "served": memory_mib(),
        "step_s": statistics.mean(steps), "median_step_s": statistics.median(steps),
        "layers_s": statistics.mean(layers_s), "stall_s": statistics.mean(stalls),
        "median_layers_s": statistics.median(layers_s),
        "num_layers": model.num_layers, "transferred_bytes": num_bytes,
        "transfer_s": None if executor.streamer is None else transfer_s(executor, options.gib_per_s),
        "packed_cached_mib": [cached_mib(path) for path in newest_packed()],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--intervals", default="none,4,2,1")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kv-gib", type=float, default=0.25)
    parser.add_argument(
        "--device-memory", type=float, help="GiB; the KV pool gets what is left, and is filled"
    )
    parser.add_argument("--gib-per-s", type=float, help="bandwidth of transfers; default: the disk's")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    restart_in_engine_environment()
    if options.child:
        print(json.dumps(measure(options, options.intervals)))
        return
    results = [run_child(interval) for interval in options.intervals.split(",")]
    resident = next((each for each in results if each["interval"] == "none"), None)
    for each in results:
        print_row(each, resident)
    print(json.dumps({"benchmark": "offloading", **vars(options), "results": results}))


def run_child(interval: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--child", "--intervals", interval]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def print_row(result: dict[str, Any], resident: dict[str, Any] | None) -> None:
    served = result["served"]
    line = (
        f"{result['interval']:>5}: rss {served['rss']:.0f} MiB (anonymous {served['anonymous']:.0f}, file "
        f"{served['file']:.0f}, peak {served['peak_rss']:.0f}); step {1e3 * result['step_s']:.1f} ms, of it "
        f"stalls {1e3 * result['stall_s']:.2f}; packed files in the page cache, MiB: "
        f"{result['packed_cached_mib']}; anonymous pages above those before the start "
        f"{served['anonymous'] - result['before']['anonymous']:.0f} MiB"
    )
    if resident is not None and result["transfer_s"] is not None:
        num_layers = result["num_layers"]
        times = LayerTimes(
            num_layers,
            compute_s=resident["layers_s"] / num_layers,
            transfer_s=result["transfer_s"],
            other_s=resident["step_s"] - resident["layers_s"],
        )
        result["times"] = asdict(times)
        result["predicted_s"] = step_time_s(times, int(result["interval"]))
        line += (
            f"; predicted {1e3 * result['predicted_s']:.1f} ms (a layer {1e3 * times.compute_s:.2f}, a "
            f"transfer {1e3 * times.transfer_s:.2f})"
        )
    print(line)


if __name__ == "__main__":
    main()
