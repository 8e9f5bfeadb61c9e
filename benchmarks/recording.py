"""How many results a second are recorded durably, by the results that one transaction or one write has.

In files as one server does, and in a database as servers that share it do: SQLite, and with --url another.

Usage: recording.py [--url postgresql://...] [--seconds 2]. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import count
from pathlib import Path

from backfill.jobs.database import open_database, open_in_memory
from backfill.jobs.database_results import BatchLog, DatabaseResults, FileResults
from backfill.jobs.leases import Leases
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.object_store import open_file_store
from backfill.jobs.records import BatchRecord, BatchStatus, FileRecord
from backfill.jobs.store import JobStore
from backfill.preparation.lines import BatchLine

GROUPS = (1, 8, 32, 256)
TEXT = "x" * 1500  # a result has 1.7 KB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = {"files": log_in_files(Path(folder)), "sqlite": log_in_database(None, Path(folder))}
        if args.url is not None:
            logs["database"] = log_in_database(args.url, Path(folder))
        for name, log in logs.items():
            figures[name] = rates(log, args.seconds)
            print(f"{name:10s}", *(f"{rate:10.0f}" for rate in figures[name].values()))
    print(json.dumps({"benchmark": "recording", **figures}))


def log_in_files(folder: Path) -> BatchLog:
    files = open_file_store(None, folder)
    files.open_folder(None)
    log = FileResults(open_in_memory(), files, None).log_of(batch_record(), None)
    log.open()
    return log


def log_in_database(url: str | None, folder: Path) -> BatchLog:
    engine = open_database(url, folder)
    leases = Leases(engine, "server", 3600.0)
    store = JobStore(engine, leases)
    batch = batch_record()
    file = FileRecord(
        id=batch.input_file_id,
        owner="",
        num_bytes=1,
        created_at=0,
        expires_at=None,
        filename="in.jsonl",
        purpose="batch",
    )
    store.add_file(file)
    store.add_batch(batch, 100)
    claim = leases.claim(model_names=["m"])
    assert claim is not None
    log = DatabaseResults(engine, open_file_store(None, folder), leases).log_of(claim.batch, claim.lease)
    log.open()
    return log


def rates(log: BatchLog, seconds: float) -> dict[int, float]:
    """Results a second, by the number in a group."""
    found, numbers = {}, count(log.num_completed)
    for size in GROUPS:
        num_recorded, started_at_s = 0, time.perf_counter()
        while time.perf_counter() - started_at_s < seconds:
            log.append([result(next(numbers)) for _ in range(size)])
            num_recorded += size
        found[size] = num_recorded / (time.perf_counter() - started_at_s)
    return found


def batch_record() -> BatchRecord:
    return BatchRecord(
        id="batch_1",
        owner="",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        status=BatchStatus.IN_PROGRESS,
        created_at=0,
        expires_at=1 << 40,
        output_blob="file-output",
        error_blob="file-error",
        output_retention_s=1,
    )


def result(number: int) -> LineResult:
    line = BatchLine(number=number, custom_id=f"request-{number}", request_id="req")
    body = {"object": "text_completion", "choices": [{"index": 0, "text": TEXT}]}
    return completed(line, body | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})


if __name__ == "__main__":
    main()
