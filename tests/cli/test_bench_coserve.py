"""``backfill bench coserve`` from the command line to the result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from backfill.bench.coserve_load import CoserveLoad
from backfill.cli.bench_coserve import ServerOptions, _explain, _run_on
from backfill.execution.machine import stolen_s
from tests.api.batch_inputs import as_jsonl, chat_line, submit, wait_ended
from tests.api.servers import SMALL_MODEL, TIMEOUT_S, RunningServer, small_server, wait_until
from tests.cli.running import run_cli_here
from tests.patience import with_more_time

SHORT = (
    *("--duration", "1", "--warmup", "0.5", "--rate", "8", "--input-len", "20", "--output-len", "8"),
    *("--offline-input-len", "16:32", "--offline-output-len", "4:8", "--offline-concurrency", "4"),
)
CONTEXT = ("--max-model-len", "512")


def coserve(*arguments: str) -> Any:
    return run_cli_here("bench", "coserve", "--no-progress", *arguments)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.bench.coserve._SAMPLE_S", 0.5)
    monkeypatch.setattr("backfill.bench.coserve._RETRY_S", 0.1)
    monkeypatch.setattr("backfill.bench.offline._POLL_S", 0.1)


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with small_server(small_model, *CONTEXT, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def own_server_options(model: Path, *options: str) -> tuple[str, ...]:
    """For servers that the benchmark starts."""
    return ("--model", str(model), "--server-option", " ".join((*SMALL_MODEL, *CONTEXT, *options)))


@pytest.mark.slow  # servers of its own are below, and their figures in tests/bench
def test_policies_one_after_another(small_model: Path, tmp_path: Path) -> None:
    with_more_time(lambda factor: check_policies(small_model, tmp_path / f"{factor:g}", factor))


def check_policies(model: Path, folder: Path, duration_s: float) -> None:
    folder.mkdir()
    files = ("--plot", str(folder / "a.png"), "--result", str(folder / "a.json"))
    logs = ("--log-dir", str(folder / "logs"))
    options = (*own_server_options(model), "--duration", f"{duration_s:g}")
    result = coserve("--policies", "online-only,fcfs", *SHORT, *options, *files, *logs, "--json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout.splitlines()[-1])
    assert content["scenario"] == "coserve" and list(content["policies"]) == ["online-only", "fcfs"]
    for name, figures in content["policies"].items():
        assert (figures["status"], figures["failed"], figures["unfinished"]) == ("complete", 0, 0), name
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
        assert 0 <= figures["itl_p50_s"] <= figures["itl_p99_s"]  # chunks may arrive together
        assert figures["recomputed_token_share"] == 0.0
    alone, flooded = content["policies"].values()
    assert alone["num_online"] == flooded["num_online"] > 0
    assert alone["offline_tok_s"] == 0.0 and flooded["offline_tok_s"] > 0
    assert flooded["tokens_from"] == "server" and flooded["total_tok_s_over_fcfs"] == 1.0
    assert flooded["ttft_p99_over_online_only"] == flooded["ttft_p99_s"] / alone["ttft_p99_s"]
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((folder / "a.json").read_text())
    assert saved["policies"] == content["policies"] and saved["timelines"]["fcfs"]["ttfts"]
    assert sorted(path.name.rsplit("-", 2)[0] for path in (folder / "logs").iterdir()) == [
        "fcfs",
        "online-only",
    ]


@pytest.mark.slow
def test_a_batch_on_a_running_server_beside_an_earlier_result(server: RunningServer, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    result = coserve("--base-url", server.url, "--label", "alone", *SHORT,
                     "--offline-mode", "none", "--result", str(earlier))  # fmt: skip
    assert result.returncode == 0, result.stderr
    prepare_batches(server)
    with_more_time(lambda factor: check_batch(server, earlier, 3 * factor))
    # Nothing is left behind.
    assert server.http.get("/v1/files").json()["data"] == []
    # The database knows of the batch's end first.
    wait_until(lambda: server.metric("backfill:batch_jobs") == 0, "the batch to be forgotten")


def prepare_batches(server: RunningServer) -> None:
    """Its first batch starts a process, which takes longer than the benchmark."""
    client = server.client()
    batch = wait_ended(client, submit(client, as_jsonl([chat_line("a")])).id)
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert file_id is not None
        client.files.delete(file_id)


def check_batch(server: RunningServer, earlier: Path, duration_s: float) -> None:
    """Batches end in this time, however late the first one begins."""
    result = coserve("--base-url", server.url, "--label", "ours", *SHORT, "--duration", f"{duration_s:g}",
                     "--offline-mode", "batch", "--offline-lines", "10", "--seed", "1",
                     "--compare", str(earlier), "--json")  # fmt: skip
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout.splitlines()[-1])
    ours, alone = content["policies"]["ours"], content["policies"]["alone"]
    assert ours["failed"] == 0 and ours["offline_completed"] > 0 and ours["offline_tok_s"] > 0
    assert alone["offline_tok_s"] == 0.0 and content["model"] == "smollm2-135m-instruct"
    assert f"--compare {earlier} is of another load: duration_s, seed differ." in result.stderr


@pytest.mark.slow
def test_a_server_that_dies_midway(small_model: Path, tmp_path: Path) -> None:
    def kill_it() -> None:
        """Within its measurement, which begins after half a second at eight requests a second."""
        wait_until(lambda: _num_online_answered(tmp_path) >= 10, "the measurement")
        os.kill(_config(tmp_path)["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    options = own_server_options(small_model, "--data-dir", str(tmp_path / "data"))
    options += ("--log-dir", str(tmp_path))
    result = coserve("--policies", "priority", *SHORT, "--duration", "60", *options, "--json")
    killer.join()
    assert result.returncode == 1
    assert "The server of priority ended with status -9. Its whole log is" in result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])["policies"]["priority"]
    assert figures["status"] == "server lost" and 0 < figures["measured_s"] < 60
    assert figures["num_online"] > 0 and "priority (partial)" in result.stdout


def _config(folder: Path) -> Any:
    """What the server that keeps its data there says of itself."""
    return json.loads((folder / "data" / "config.json").read_text())


def _num_online_answered(folder: Path) -> float:
    """Online requests that this server has answered; 0 before it is ready."""
    try:
        url = f"http://127.0.0.1:{_config(folder)['server']['port']}/metrics"
        lines = httpx.get(url).text.splitlines()
    except (OSError, ValueError, httpx.HTTPError):
        return 0.0
    name = "backfill:request_success_total{"
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(name) and 'class="online"' in line
    )


@pytest.mark.slow  # without a command: tests/bench/test_coserve.py
def test_interrupt_keeps_and_marks_what_was_measured(server: RunningServer) -> None:
    command = [sys.executable, "-m", "backfill", "bench", "coserve", "--base-url", server.url, "--json"]
    command += [*SHORT, "--duration", "60"]
    before = server.metric("backfill:request_success_total", **{"class": "online"})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    online = {"class": "online"}
    wait_until(lambda: server.metric("backfill:request_success_total", **online) >= before + 9, "answers")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, stderr
    figures = json.loads(stdout.splitlines()[-1])["policies"]["server"]
    assert figures["status"] == "interrupted" and figures["num_online"] > 0
    assert "partial results" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "slo,best"], "--policies: there is no 'best'; there are slo, "),
        (["--policies", ","], "--policies names none"),
        (["--offline-mode", "bulk"], "--offline-mode must be none, flex, priority or batch"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--base-url", "localhost:1"], "--base-url must begin with http:// or https://"),
        (["--base-url", "http://127.0.0.1:1", "--policies", "slo"], "--policies and --server-option start"),
        (["--server-option", "'"], '--server-option "\'": No closing quotation.'),
        (["--server-option", "--port 1"], "--server-option --port is set by this command."),
        (["--start-timeout", "0"], "--start-timeout must be above 0"),
        (["--plot", "/no/such/folder/a.png"], "there is no folder /no/such/folder"),
        (["--compare", "/no/such/file.json"], "--compare /no/such/file.json cannot be read"),
        (["--compare", __file__], "is no result of bench coserve --result."),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = coserve(*arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_an_online_load_beyond_capacity_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"online-only": 0.4, "fcfs": 0.1, "online-only --threads 2": 0.95}
    _explain({name: {"status": "complete", "ttft_attainment": share} for name, share in shares.items()})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("online-only: the online load alone is beyond this server's capacity: 40%")


def test_a_p99_of_few_requests_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    few, enough = {"status": "complete", "num_online": 99}, {"status": "complete", "num_online": 100}
    rounds = {"status": "complete", "num_online": 140, "rounds": [{"num_online": 101}, {"num_online": 39}]}
    _explain({"fcfs": few, "slo": enough, "priority": rounds, "online-only": {**enough, "num_online": 0}})
    assert [line.partition(" requests")[0] for line in capsys.readouterr().out.splitlines()] == [
        "fcfs: the TTFT's P99 of 99",
        "priority: the TTFT's P99 of 39",
    ]


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"status": "complete", "num_online": 120, "num_left_out": 80, "left_out_s": 12.3}
    _explain({"slo": figures})
    left_out, few = capsys.readouterr().out.splitlines()
    assert left_out.startswith("slo: a hypervisor took much of 12 s: what falls into these is left")
    assert few.startswith("slo: the TTFT's P99 of 40 requests")


@pytest.mark.parametrize("base_url", [None, "http://127.0.0.1:1"])
def test_stolen_time_is_looked_for_beside_servers_of_its_own_alone(
    monkeypatch: pytest.MonkeyPatch, base_url: str | None
) -> None:
    passed: dict[str, Any] = {}

    async def run_coserve(*_: Any, **options: Any) -> None:
        passed.update(options)

    monkeypatch.setattr("backfill.cli.bench_coserve.run_coserve", run_coserve)
    _run_on("http://127.0.0.1:1", ServerOptions(base_url=base_url), CoserveLoad(), "slo", is_silent=True)
    assert (passed["stolen_s"] is stolen_s) == (base_url is None)


def test_nobody_answers() -> None:
    result = coserve("--base-url", "http://127.0.0.1:1", "--json")
    assert result.returncode == 1
    assert "backfill: No server answers at http://127.0.0.1:1: Connection refused.\n" in result.stderr
    assert json.loads(result.stdout)["policies"] == {}


@pytest.mark.slow
def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    options = ("--server-option", "--chat-template /no/such_file", "--log-dir", str(tmp_path))
    result = coserve(*options)
    assert result.returncode == 1
    assert (
        "backfill: Policy online-only: The server ended with status 1: "
        "--chat-template /no/such_file cannot be read"
    ) in result.stderr
    assert "Its whole log is" in result.stderr
    assert len(list(tmp_path.iterdir())) == 1
