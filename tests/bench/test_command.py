"""``backfill bench serve`` from the command line to the result file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.servers import TIMEOUT_S, RunningServer, wait_until
from tests.cli.running import run_cli_here


def bench(*arguments: str) -> Any:
    return run_cli_here("bench", "serve", *arguments)


def test_eight_requests_to_the_real_server(server: RunningServer, tmp_path: Path) -> None:
    result = bench(
        *("--base-url", f"{server.url}/v1", "--num-prompts", "8", "--request-rate", "40", "--cv", "2"),
        *("--random-input-len", "24", "--random-output-len", "6", "--ignore-eos", "--num-warmups", "1"),
        *("--goodput", "ttft:60000", "tpot:60000", "--header", "X-A=1", "X-B=2", "--metadata", "run=7"),
        *("--ready-check-timeout-sec", "300", "--json", "--plot", str(tmp_path / "report.png")),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
    )
    assert result.returncode == 0, result.stderr
    assert " Serving Benchmark Result " in result.stdout
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["status"], figures["completed"], figures["failed"]) == ("complete", 8, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (8 * 24, 8 * 6)
    assert figures["slo_attainment"] == {"ttft": 1.0, "tpot": 1.0, "all": 1.0}
    assert figures["run"] == "7" and figures["burstiness"] == 0.25
    assert 0 < figures["p50_itl_ms"] <= figures["p99_itl_ms"] < figures["p99_e2el_ms"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["output_lens"] == [6] * 8
    assert [len(gaps) for gaps in saved["itls"]] == [5] * 8


def test_chat_prompts_have_the_length_asked_for(server: RunningServer) -> None:
    result = bench(
        *("--backend", "openai-chat", "--base-url", server.url, "--num-prompts", "2", "--input-len", "50"),
        *("--output-len", "3", "--ignore-eos", "--percentile-metrics", "ttft", "--json"),
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    # The template adds its own tokens, the same to both.
    assert figures["total_output_tokens"] == 6 and 100 < figures["total_input_tokens"] < 200


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_conversations_with_the_real_server(server: RunningServer, backend: str) -> None:
    result = bench(
        *(
            "--backend",
            backend,
            "--base-url",
            server.url,
            "--dataset-name",
            "multi_turn",
            "--num-prompts",
            "2",
        ),
        *(
            "--multi-turn-num-turns",
            "3",
            "--multi-turn-first-input-len",
            "20",
            "--multi-turn-input-len",
            "10",
        ),
        *("--multi-turn-think-time", "0.01", "--multi-turn-system-len", "10", "--output-len", "4"),
        *("--ignore-eos", "--num-warmups", "1", "--json"),
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["num_prompts"], figures["completed"], figures["multi_turn_output_len"]) == (2, 6, 4)
    first, second, third = figures["by_turn"]
    assert [turn["completed"] for turn in figures["by_turn"]] == [2, 2, 2]
    # Each turn adds a message and an answer; text may encode otherwise where they meet.
    assert 2 * (10 + 20) <= first["input_tokens"] < second["input_tokens"] < third["input_tokens"]
    assert figures["total_cached_tokens"] is not None


def test_refused_requests_are_shown_and_decide_the_exit_code(server: RunningServer) -> None:
    result = bench("--base-url", server.url, "--num-prompts", "2", "--input-len", "600", "--output-len", "4")
    assert result.returncode == 1
    assert "2 of 2 requests exceed the server's context of 512 tokens." in result.stderr
    assert "     2 x HTTP 400: " in result.stdout


def test_interrupt_keeps_and_marks_what_was_measured(server: RunningServer) -> None:
    command = [sys.executable, "-m", "backfill", "bench", "serve", "--base-url", server.url, "--json"]
    command += ["--num-prompts", "200", "--request-rate", "5", "--input-len", "8", "--output-len", "2"]
    before = server.metric("backfill:request_success_total")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # More than three: the client reads the end of a response after the server has counted it.
    wait_until(lambda: server.metric("backfill:request_success_total") >= before + 6, "answers")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, stderr
    figures = json.loads(stdout.splitlines()[-1])
    assert figures["status"] == "interrupted"
    assert figures["completed"] >= 3 and figures["not_sent"] > 0
    assert "partial results" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--base-url", "http://127.0.0.1:1"],
            "No server answers at http://127.0.0.1:1: Connection refused.",
        ),
        (["--base-url", "127.0.0.1:1"], "--base-url must begin with http:// or https://"),
        (["--backend", "tgi"], "--backend must be openai, vllm or openai-chat, got 'tgi'."),
        (["--cv", "-1"], "--cv must be a number of at least 0"),
        (["--cv", "1", "--burstiness", "1"], "give one of them"),
        (["--burstiness", "0"], "--burstiness must be above 0"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--phases", "30"], "--phases takes SECONDS:RATE"),
        (["--phases", "30:1", "--request-rate", "2"], "Only one of"),
        (["--ramp-up-strategy", "linear"], "go together"),
        (["--random-length-cv", "1"], "goes with --random-length-law"),
        (["--random-length-law", "normal"], "goes with --random-length-law"),
        (["--random-range-ratio", "1"], "range ratio"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--goodput", "speed:1"], "--goodput takes NAME:MILLISECONDS"),
        (["--goodput", "ttft:1", "--goodput", "speed:1"], "--goodput takes NAME:MILLISECONDS"),
        (["--goodput", "ttft:1", "speed:1", "--no-progress"], "--goodput takes NAME:MILLISECONDS"),
        (["--random_prefix_len", "-1"], "--random-prefix-len must be at least 0"),
        (["--ttft-slo", "-1"], "--ttft-slo takes"),
        (["--extra-body", "{"], "--extra-body must be a JSON object"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--header", "x"], "--header takes KEY=VALUE"),
        (["--metric-percentiles", "101"], "--metric-percentiles takes numbers"),
        (["--percentile-metrics", "speed"], "--percentile-metrics must be one of"),
        (["--dataset-name", "trace"], "--dataset-name trace needs --dataset-path"),
        (["--dataset-name", "hf"], "--dataset-name must be random, sharegpt, trace, prefix_"),
        (
            ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "0"],
            "--prefix-repetition-num-prefixes must be at least 1, got 0.",
        ),
        (
            ["--dataset-name", "prefix_repetition", "--num-prompts", "9"],
            "--num-prompts must be at least --prefix-repetition-num-prefixes 10, got 9.",
        ),
        (["--prefix-repetition-suffix-len", "-1"], "--prefix-repetition-suffix-len must be at least 0"),
        (["--multi-turn-num-turns", "0"], "--multi-turn-num-turns must be at least 1"),
        (["--multi-turn-input-len", "-1"], "--multi-turn-input-len must be at least 1"),
        (["--multi-turn-think-time", "-1"], "--multi-turn-think-time must be a number of at least 0"),
        (
            ["--multi-turn-think-time-law", "gamma"],
            "--multi-turn-think-time-law must be exponential or fixed",
        ),
        (
            ["--dataset-name", "multi_turn", "--input-len", "8"],
            "--input-len does not go with --dataset-name multi_turn",
        ),
        (["--plot", "/no/such/folder/a.png"], "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = bench("--tokenizer", "none", *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_options_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text('base-url = "http://127.0.0.1:1"\ngoodput = ["ttft:1000", "speed:50"]\n')
    result = bench("--config", str(path))
    assert result.returncode == 1
    assert result.stderr.startswith(f"backfill: goodput in {path} takes NAME:MILLISECONDS")
    result = bench("--config", str(path), "--goodput", "ttft:1000")
    assert result.stderr == "backfill: No server answers at http://127.0.0.1:1: Connection refused.\n"


def test_a_plot_without_matplotlib_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench("--plot", "a.png", "--base-url", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr == (
        "backfill: --plot needs matplotlib, which is not installed: pip install 'backfill[plot]'.\n"
    )


def test_a_dataset_that_is_missing_says_where_one_is_published() -> None:
    result = bench(
        "--dataset-name", "trace", "--dataset-path", "no-such.csv", "--base-url", "http://127.0.0.1:1"
    )
    assert result.returncode == 1
    assert result.stderr.startswith(
        "backfill: --dataset-path no-such.csv cannot be read: there is no such file."
    )
    assert "https://github.com/microsoft/vidur" in result.stderr
