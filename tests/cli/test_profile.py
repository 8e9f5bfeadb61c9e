"""``backfill profile`` with a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.offloading.record import PerformanceRecord
from tests.cli.running import assert_refused, run_cli_here, run_to_json
from tests.models.tiny import save_tiny_llama_config

SMALL = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--kv-gib", "0.01")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> str:
    save_tiny_llama_config(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_profile_is_measured_written_and_printed(model: str, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder" / "profile.json"
    done = run_cli_here("profile", model, *SMALL, "--quick", "--json", "--out", str(out), "--threads", "1")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    assert content["path"] == str(out)
    assert content["key"]["dtype"] == "float32"
    assert content["key"]["device"].endswith(", 1 threads")
    assert content["num_layers"] == 3
    assert content["error"]["num_steps"] > 0
    assert content["error"]["median"] >= 0
    assert {"rows_s", "sampled_s", "request_s", "prefill_pair_s"} <= set(content["cost"])
    profile = CostProfile.load(out)
    assert list(profile.cost.rows_s.y) == content["cost"]["rows_s"]["y"]
    assert profile.cost.step_time_s(StepLoad.of([(0, 64, True)])) > 0
    assert "prompt of 256 tokens" in done.stdout
    lines = re.findall(r"backfill: (\d+) of (\d+) steps timed", done.stderr)
    assert len(lines) == 10 and lines[-1][0] == lines[-1][1], "without a terminal, a line each tenth"
    assert not (cache / "profiles").exists(), "--out is written instead"


def test_a_folder_is_no_file_for_a_profile(model: str, tmp_path: Path) -> None:
    result = run_cli_here("profile", model, *SMALL, "--quick", "--out", str(tmp_path))
    assert_refused(result, f"--out {tmp_path} is a folder, and a file is needed.")
    assert "steps timed" not in result.stderr


def test_without_a_file_it_goes_where_serve_looks(model: str, cache: Path, tmp_path: Path) -> None:
    bus = ("--offload-interval", "1", "--offload-bus", str(tmp_path / "bus"), "--offload-bus-gib-per-s", "1")
    done = run_cli_here("profile", model, *SMALL, *bus, "--quick")
    assert done.returncode == 0, done.stderr
    (path,) = (cache / "profiles").glob("*.json")
    key = CostProfile.load(path).key
    assert key.model.startswith("llama-3x48-")
    assert key.device.endswith(", offload interval 1, bus of 1 GiB/s")
    assert path.name in done.stdout.replace("\n", "")
    assert not done.stdout.rstrip().endswith("}"), "JSON only where it is asked for"


def test_a_performance_record_is_measured_written_and_printed(model: str, cache: Path) -> None:
    """The table is as wide as 80 columns allow, and nothing in it is cut."""
    printed, content = run_to_json(
        "profile", model, *SMALL, "--offload", "--quick", "--json", "--tpot-slo", "1000"
    )
    (path,) = (cache / "profiles").glob("*.offload.json")
    record = PerformanceRecord.load(path)
    assert content["path"] == str(path)
    assert content["objectives"] == {"ttft_s": 1.0, "tpot_s": 1000.0}
    assert content["transfer_s"] == record.transfer_s == max(content["alone_s"], content["beside_s"])
    assert "…" not in printed
    rows = [line.strip("│ ").split() for line in printed.splitlines() if line.startswith("│")]
    cells = [[cell for cell in row if cell != "│"] for row in rows]
    assert [each[:3] for each in cells] == [
        [each.phase, str(each.batch_size), str(each.length)] for each in record.loads
    ]
    assert {each[6] for each in cells if each[0] == "decode"} == {"1"}
    assert [str(each["interval"]) for each in content["loads"]] == [each[6] for each in cells]
    assert all(len(line) <= 80 for line in printed.splitlines() if line.startswith(("│", "┃")))


@pytest.mark.slow  # what is measured: tests/parallel/test_rank_records.py
def test_a_performance_record_of_two_ranks_is_measured(model: str, cache: Path) -> None:
    ranks = ("--tensor-parallel-size", "2", "--threads", "2")
    done = run_cli_here("profile", model, *SMALL, *ranks, "--offload", "--quick", "--max-num-seqs", "8")
    assert done.returncode == 0, done.stderr
    (path,) = (cache / "profiles").glob("*.offload.json")
    record = PerformanceRecord.load(path)
    assert record.key.device.endswith(", 1 threads, 2 x 1 ranks")
    assert path.name in done.stdout


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--dtype", "int8"), "--dtype"),
        (("--device", "tpu"), "--device"),
        (("--kv-gib", "-1"), "--kv-gib"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--block-size", "7"), "--block-size must be 8"),
        (("--max-num-seqs", "512", "--max-num-batched-tokens", "8"), "--max-num-batched-tokens (8)"),
        (("--max-model-len", "100000"), "--max-model-len 100000"),
        (("--max-model-len", "1"), "no step to time"),
        (("--quick", "--out", "/dev/null/profile.json"), "/dev/null/profile.json cannot be written"),
        (("--offload", "--quick", "--out", "/dev/null/a.json"), "/dev/null/a.json cannot be written"),
        (("--offload", "--max-model-len", "16"), "no load to time within a context of 16 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_is_said_in_one_line(model: str, options: tuple[str, ...], part: str) -> None:
    done = run_cli_here("profile", model, *SMALL, *options)
    assert done.returncode == 1
    (line,) = [each for each in done.stderr.splitlines() if not each.endswith(" steps timed")]
    assert line.startswith("backfill: ")
    assert part in line


def test_an_unknown_model_is_said_in_one_line() -> None:
    done = run_cli_here("profile", "no-such-model", *SMALL)
    assert done.returncode == 1
    assert "no-such-model" in done.stderr.splitlines()[-1]
