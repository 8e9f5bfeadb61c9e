"""What a batch costs beside its answers: upload, validation and bookkeeping of many one-token lines.

The lines go through the real store, preparation process, feeder and result files; a runner that answers at
once replaces the engine. ``prepare_us_per_line`` is CPU time of the preparation process; all other CPU times
and the memory are this process's.

Usage: batch_overhead.py [--lines 100000] [--upload-mib 512]. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.execution.executor import ExecutorInfo
from backfill.jobs.config import JobsConfig
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchStatus
from backfill.models.resolve import resolve_model
from backfill.preparation.client import PreparationClient
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import PreparationSetup
from backfill.protocol.preparer import EngineFacts, ServedModel

PIECE_BYTES = 1 << 20
FACTS = EngineFacts(
    info=ExecutorInfo(1024, 16, 8192, 49152, (2,), "cpu", "bfloat16"),
    default_slo=SLO(1.0, 0.15),
    profile=None,
    scheduler=SchedulerConfig(),
)


class InstantRunner:
    async def run(self, line: BatchLine) -> LineResult:
        body = {"object": "text_completion", "choices": [{"index": 0, "text": "x"}]}
        return completed(line, body | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--upload-mib", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), args.lines, args.upload_mib))
    for name, value in figures.items():
        print(f"{name:28s} {value:10.1f}")
    print(json.dumps({"benchmark": "batch_overhead", "lines": args.lines, **figures}))


async def measure(folder: Path, num_lines: int, upload_mib: int) -> dict[str, float]:
    config = JobsConfig(
        data_dir=folder, batch_max_lines=num_lines, batch_max_bytes=1 << 40, max_file_bytes=1 << 40
    )
    model = ServedModel(names=("m",), root="m", folder=resolve_model("smollm2-135m-instruct"), created=0)
    preparation = PreparationClient(PreparationSetup(model=model, order="fcfs"))
    preparation.start()
    preparation.configure(FACTS)
    manager = JobManager(config, preparation, model_names=["m"], runner=InstantRunner())
    await manager.start()
    content = b"".join(input_line(index) for index in range(num_lines))
    # Reset the peak, which importing torch has set.
    Path("/proc/self/clear_refs").write_text("5")
    rss_before = peak_kib()
    cpu_before = time.process_time()
    batch_id = await submit(manager, await upload(manager, content, "batch"))
    while (await manager.get_batch("", batch_id)).status is BatchStatus.VALIDATING:
        await asyncio.sleep(0.05)
    cpu_validated, prepare_before_s = time.process_time(), cpu_of(preparation.files.pid)
    service: Any = None
    manager.engine_ready(service, max_num_seqs=256)
    while not (batch := await manager.get_batch("", batch_id)).status.is_final:
        await asyncio.sleep(0.05)
    cpu_after = time.process_time()
    rss_after, prepare_s = peak_kib(), cpu_of(preparation.files.pid) - prepare_before_s
    # Last: its memory would hide the lines' peak.
    started_at_s = time.perf_counter()
    await upload(manager, bytes(upload_mib << 20), "user_data")
    upload_s = time.perf_counter() - started_at_s
    await manager.stop()
    await preparation.stop()
    if batch.request_counts.completed != num_lines:
        raise SystemExit(f"expected {num_lines} completed lines, got {batch.request_counts}")
    return {
        "upload_mb_s": (upload_mib << 20) / 1e6 / upload_s,
        "validation_us_per_line": 1e6 * (cpu_validated - cpu_before) / num_lines,
        "bookkeeping_us_per_line": 1e6 * (cpu_after - cpu_validated) / num_lines,
        "cpu_us_per_line": 1e6 * (cpu_after - cpu_before) / num_lines,
        "prepare_us_per_line": 1e6 * prepare_s / num_lines,
        "added_mib": (rss_after - rss_before) / 1024,
    }


def cpu_of(pid: int | None) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def input_line(index: int) -> bytes:
    body = {"model": "m", "prompt": "Say x", "max_tokens": 1}
    line = {"custom_id": f"request-{index}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


async def upload(manager: JobManager, content: bytes, purpose: str) -> str:
    receiver = await manager.files.begin_upload("")
    for start in range(0, len(content), PIECE_BYTES):
        await receiver.write(content[start : start + PIECE_BYTES])
    return (await receiver.finish(filename="in.jsonl", purpose=purpose, expires_after_s=None)).id


async def submit(manager: JobManager, file_id: str) -> str:
    batch = await manager.create_batch(
        "",
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window="24h",
        completion_window_s=24 * 3600,
        metadata=None,
        output_expires_after_s=None,
    )
    return batch.id


if __name__ == "__main__":
    main()
