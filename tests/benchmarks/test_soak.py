from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from soak_batches import lines_of
from soak_checks import (
    BatchAnswers,
    faults_of,
    growth_fracs,
)
from soak_checks import Histogram as Parsed
from soak_disk import Disk, DiskMode
from soak_load import Outcome, Outcomes, request_of
from soak_stalls import lag_faults
from soak_watch import ProbeRecords, lag_figures, table

ANSWERED = BatchAnswers(
    "batch_1",
    "completed",
    total=3,
    completed=2,
    failed=1,
    asked=["a", "bad-b", "c"],
    output=["c", "a"],
    errors=["bad-b"],
)


def test_each_line_once_in_one_file() -> None:
    assert faults_of(ANSWERED) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"status": "failed"}, "it ended as failed"),
        ({"output": ["c"], "completed": 1}, "no answer for 1 lines, such as a"),
        ({"output": ["c", "a", "z"], "completed": 3}, "an answer nobody asked for for 1 lines, such as z"),
        ({"output": ["c", "a", "a"], "completed": 3}, "more than one answer for 1 lines, such as a"),
        ({"errors": ["bad-b", "a"], "failed": 2}, "more than one answer for 1 lines, such as a"),
        ({"output": ["c"], "completed": 1, "errors": ["bad-b", "a"], "failed": 2}, "an error for 1 lines"),
        ({"output": ["c", "a", "bad-b"], "errors": []}, "an answer that should be an error for 1 lines"),
        ({"total": 4}, "request_counts.total is 4, the files have 3"),
        ({"completed": 1}, "request_counts.completed is 1, the files have 2"),
        ({"failed": 0}, "request_counts.failed is 0, the files have 1"),
    ],
)
def test_what_is_not_exactly_once_is_told(changes: dict[str, object], fault: str) -> None:
    faults = faults_of(replace(ANSWERED, **changes))  # type: ignore[arg-type]
    assert any(fault in found and found.startswith("batch_1: ") for found in faults), faults


def exposed(*observations: float) -> str:
    registry = CollectorRegistry()
    histogram = Histogram("lag", "", ["part"], buckets=[0.01, 0.02, 0.1], registry=registry)
    for index, value in enumerate(observations):
        histogram.labels(str(index % 2)).observe(value)
    return generate_latest(registry).decode()


def test_histograms_are_read_over_all_labels_and_subtracted() -> None:
    before = Parsed.parse(exposed(0.005, 0.005, 0.05), "lag")
    after = Parsed.parse(exposed(0.005, 0.005, 0.05, 0.015, 0.015, 0.015, 0.2), "lag")
    assert before is not None and after is not None
    assert after.bounds == (0.01, 0.02, 0.1, math.inf)
    assert after.counts == (2, 3, 1, 1)
    during = after.since(before)
    assert during.counts == (0, 3, 0, 1)
    assert (during.quantile(0.5), during.quantile(0.75), during.quantile(0.99)) == (0.02, 0.02, math.inf)
    assert before.since(after) == before, "a server that was started again counts from 0"
    assert after.since(None) == after
    assert (before + during).counts == after.counts
    assert math.isnan(before.since(before).quantile(0.5))
    assert Parsed.parse(exposed(0.1), "other") is None


def test_the_lag_of_a_phase_is_held_to_its_limits() -> None:
    good = lag_figures(Parsed.parse(exposed(*[0.005] * 99, 0.05), "lag"))
    assert good is not None and lag_faults("p", good) == []
    slow = lag_figures(Parsed.parse(exposed(0.005, 0.2), "lag"))
    assert slow is not None and slow["max_s"] == math.inf
    assert [fault.split(",")[0] for fault in lag_faults("p", slow)] == [
        "p: event loop lag p99_s is inf",
        "p: event loop lag max_s is inf",
    ]
    assert lag_faults("p", None) == ["p: the server exposes no event loop lag"]
    bounded = lag_figures(Parsed.parse(exposed(0.005, 0.2), "lag"), 0.21)
    assert bounded is not None and bounded["max_s"] == 0.21
    empty = lag_figures(Parsed((0.1, math.inf), (0, 0)))
    assert len(lag_faults("p", empty)) == 2, "a probe that saw nothing proves nothing"


def test_memory_is_compared_from_the_end_of_the_warm_up() -> None:
    def rounds_of(*held: int) -> list[dict[str, int]]:
        return [{"server": num_bytes, "engine": 1000} for num_bytes in held]

    assert growth_fracs(rounds_of(50, 100, 150, 106, 107)) == pytest.approx({"server": 0.06, "engine": 0.0})
    assert growth_fracs(rounds_of(80, 100, 100, 100, 130))["server"] == 0, "one round alone is no leak"
    assert growth_fracs([*rounds_of(1, 1, 1), {"engine": 1000}]) == {"engine": 0.0}


def test_failures_outside_faults_are_unexplained() -> None:
    outcomes = Outcomes()
    outcomes.all += [
        Outcome("online", 0.0, 1.0, "ok"),
        Outcome("online", 0.0, 1.0, "status 429"),
        Outcome("online", 4.0, 6.0, "cut: x"),
        Outcome("online", 7.0, 8.0, "status 500"),
    ]
    assert outcomes.unexplained([(5.0, 6.5)]) == ["online: status 500 after 1.0 s"]
    assert outcomes.counts() == {"online": {"ok": 1, "status 429": 1, "cut: x": 1, "status 500": 1}}


def test_what_the_probes_wrote_is_read_by_phase(tmp_path: Path) -> None:
    path = tmp_path / "records"
    lines = [
        ["health", 1.0, 0.5, 200],
        ["health", 2.0, 2.0, 0],  # within the outage
        ["health", 7.0, 0.1, 503],
        ["health", 8.0, 1.0, 0],
        ["late", 1.0, 0.001],
        *(["token", 1, at_s] for at_s in (1.0, 1.5, 3.5, 7.0, 7.1)),
        ["stream", 1, 1.0, 7.2, "ended"],
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = ProbeRecords(path).summary((0.0, 9.0), [(3.0, 4.0)], [(3.0, 4.0)])
    assert summary["health"] == {"count": 3, "p50_s": 0.5, "p99_s": 1.0, "max_s": 1.0, "unanswered": 1}
    assert summary["stream_gap"]["max_s"] == pytest.approx(0.5)
    assert summary["prober_late"]["count"] == 1
    late = ProbeRecords(path).summary((6.0, 7.05), [], [])
    assert (late["health"]["count"], late["stream_gap"]["count"]) == (1, 0)
    shown = table({"health": summary["health"], "lag": None})
    assert "1000.0" in shown and "not exposed" in shown


def test_rounds_of_equal_seeds_have_equal_work_and_no_prompt_in_common() -> None:
    rounds = []
    for label in ("round 1 ", "round 2 "):
        generator = random.Random(3)
        bodies = [request_of(generator, "online", f"{label}{number}")[1] for number in range(30)]
        bodies += [json.loads(line)["body"] for line in lines_of(5, 20, max_tokens=4, label=label)]
        rounds.append(bodies)
    for first, second in zip(*rounds, strict=True):
        assert first["max_tokens"] == second["max_tokens"]
    prompts = [
        body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        for body in itertools.chain(*rounds)
    ]
    assert [prompt.replace("round 2", "round 1") for prompt in prompts[50:]] == prompts[:50]
    assert len({prompt[:30] for prompt in prompts}) == len(prompts) == 100


WRITE = """
import os, sys
print("started", flush=True)
sys.stdin.readline()
for path in sys.argv[1:]:
    try:
        with open(path, "ab") as file:
            file.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(os.strerror(error.errno), flush=True)
"""


def test_the_disk_below_one_folder_is_full_or_hangs(tmp_path: Path) -> None:
    inside, workplace = tmp_path / "inside", tmp_path / "workplace"
    inside.mkdir()
    workplace.mkdir()
    (inside / "old").touch()
    disk = Disk(inside, workplace)
    paths = [str(path) for path in (inside / "new", inside / "old", workplace / "other")]

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **disk.environment},
        )
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        return process

    with start() as process:
        disk.set(DiskMode.FULL)
        output, _ = process.communicate("go\n", timeout=60)
        assert output.splitlines() == ["No space left on device"] * 2 + ["written"]
        assert disk.num_calls == 2
    with start() as process:
        disk.set(DiskMode.HANG)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        while disk.num_calls == 2:
            assert process.poll() is None
        assert not (inside / "new").exists()
        disk.set(DiskMode.PASS)
        assert process.stdout.read().splitlines() == ["written"] * 3
