from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.costs.hardware import load_device, load_hardware_profile
from backfill.costs.profile import FitError
from backfill.simulation.replay import Lengths
from backfill.simulation.workloads import TraceLengths, trace_workload
from tests.builders import make_profile
from tests.cli.running import run_cli_here, run_to_json

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
A100 = "a100-40g-llama-2-7b"


@pytest.fixture
def online(tmp_path: Path) -> Path:
    """40 requests in 20 s, the last one too long for any device here."""
    path = tmp_path / "online.csv"
    rows = [f"{i * 0.5},{100 + 10 * i},{8 + i % 5}" for i in range(40)] + ["20.0,9000,10"]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def offline(tmp_path: Path) -> Path:
    path = tmp_path / "offline.csv"
    path.write_text(
        "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{500 + 7 * i},{20 + i}\n" for i in range(30))
    )
    return path


def traffic(path: Path, **settings: float | None) -> tuple[list[float], list[Lengths], float, int]:
    """Instants and lengths of a trace's workload, its duration, and how many requests are left out."""
    arguments: dict[str, float | None] = {"rate_per_s": None, "duration_s": None, **settings}
    load, num_too_long = trace_workload(
        path,
        offline=(),
        max_len=4096,
        seed=0,
        **arguments,  # type: ignore[arg-type]
    )
    return (
        [each.at_s for each in load.online],
        [each.lengths for each in load.online],
        load.duration_s,
        num_too_long,
    )


def test_a_trace_keeps_its_times_and_lengths(online: Path) -> None:
    instants, lengths, duration_s, num_too_long = traffic(online)
    assert instants == pytest.approx([0.5 * i for i in range(40)])
    assert lengths[3] == Lengths(130, 11)
    assert (duration_s, num_too_long) == (pytest.approx(19.5), 1)


def test_a_rate_stretches_the_times_and_a_duration_cuts_them(online: Path) -> None:
    instants, _, duration_s, _ = traffic(online, rate_per_s=4.0, duration_s=5.0)
    assert duration_s == 5.0
    assert len(instants) == pytest.approx(20, abs=1)
    assert max(instants) <= 5.0
    assert np.diff(instants) == pytest.approx(np.full(len(instants) - 1, instants[1] - instants[0]))


def test_a_trace_without_times_gets_poisson_arrivals_at_a_rate(offline: Path) -> None:
    instants, lengths, duration_s, _ = traffic(offline, rate_per_s=3.0, duration_s=20.0)
    assert (len(instants), len(lengths), duration_s) == (60, 60, 20.0)
    assert instants == sorted(instants)
    assert len(set(lengths)) > 15
    with pytest.raises(ConfigError, match=r"`rate` is needed: .* has no arrival times"):
        traffic(offline)


def test_a_trace_is_not_made_longer(online: Path) -> None:
    with pytest.raises(ConfigError, match=r"`duration` must be at most 19\.5: .*online\.csv lasts no longer"):
        traffic(online, duration_s=30.0)


def test_a_batch_has_all_lengths_that_fit_in_random_order(offline: Path) -> None:
    batch = TraceLengths.read(offline)
    everything = batch.sample(None, 4096, np.random.default_rng(0))
    assert len(everything) == len(set(everything)) == 30
    assert list(everything) != sorted(everything)
    assert len(batch.sample(None, 600, np.random.default_rng(0))) < 15


def test_run_prints_a_row_for_each_figure_and_draws_a_plot(
    online: Path, offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plot = tmp_path / "mine.png"
    printed, content = run_to_json(
        "simulate", "run", "--hardware", A100, "--online", str(online), "--offline", str(offline),
        "--ttft-slo", "1.5", "--tpot-slo", "0.11", "--duration", "5", "--seeds", "2", "--json",
        "--plot", str(plot),
    )  # fmt: skip
    for name in ("goodput req/s", "TTFT met", "TPOT met", "TTFT P99 s", "offline tok/s", "offline req/s"):
        assert name in printed
    assert "11 online requests in 5 s; left out of the trace, as too long for the device: 1" in printed
    assert list(content["policies"]) == ["online-only", "priority", "slo"]
    assert [run["seed"] for run in content["runs"]] == [1, 2]
    figures = content["policies"]
    assert figures["online-only"]["offline_rps"] == 0 < figures["slo"]["offline_rps"]
    assert figures["slo"]["goodput_rps"] == pytest.approx(11 / 5)
    assert content["slo"] == {"ttft_s": 1.5, "tpot_s": 0.11}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A profile as ``backfill profile`` saves it."""
    path = tmp_path / "cpu.json"
    replace(make_profile(), error=FitError(0.05, 0.15, 40, (0.9, 1.0, 1.2))).save(path)
    return path


@pytest.mark.slow  # what a profile makes of a device is tested below
def test_a_measured_cost_profile_is_a_device(measured: Path, online: Path, offline: Path) -> None:
    command = ("simulate", "run", "--hardware", str(measured), "--online", str(online))
    command += ("--offline", str(offline), "--policies", "slo", "--duration", "5", "--json")
    _, content = run_to_json(*command, "--kv-tokens", "20000", "--plot", str(measured.with_suffix(".png")))
    assert content["hardware"] == "cpu"
    assert content["policies"]["slo"]["checkpointed_token_share"] == 0
    refused = run_cli_here(*command)
    assert refused.returncode == 1
    assert "--kv-tokens is needed with the cost profile" in refused.stderr


def test_the_engine_predicts_with_the_profile_that_its_user_measured(measured: Path) -> None:
    device, profile = load_device(str(measured), 20_000, 1000, None)
    assert profile == device.costs == replace(make_profile(), error=device.costs.error)
    assert device.max_model_len == profile.known_tokens
    without_copies, _ = load_device(str(measured), 20_000, None, 1000)
    assert (without_copies.costs.copies, without_copies.max_model_len) == (None, 1000)


def test_a_hardware_profile_in_a_file_is_the_one_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    folder = resources.files("backfill.costs").joinpath("hardware_profiles")
    path.write_text(folder.joinpath(f"{A100}.json").read_text())
    device, profile = load_device(str(path), None, None, None)
    assert profile is None
    assert replace(device, name=A100) == load_hardware_profile(A100)
    smaller, _ = load_device(A100, 5000, 10, 2000)
    assert (smaller.kv_tokens, smaller.kv_bytes_per_token, smaller.max_model_len) == (5000, 10, 2000)


def test_a_damaged_hardware_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    content = {"costs": {"format": 4, **asdict(make_profile())}, "kv_tokens": -3, "max_model_len": 100}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"hardware profile .*mine\.json is damaged"):
        load_device(str(path), None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "h100"], "--hardware 'h100' is no file and no hardware profile; there are a100-40g"),
        (["--hardware", "{online}"], "online.csv is not JSON"),
        (["--hardware", A100, "--online", "missing.csv"], "--online missing.csv cannot be read"),
        (["--hardware", A100, "--offline", "missing.csv"], "--offline missing.csv cannot be read"),
        (["--hardware", A100, "--policies", "lifo"], "there is no 'lifo'"),
        (["--hardware", A100, "--rate", "0"], "--rate must be between 0.001 and 1000000, got 0"),
        (["--hardware", A100, "--duration", "-1"], "--duration must be between 0.001 and 1000000, got -1"),
        (["--hardware", A100, "--rate", "1e-300"], "--rate must be between 0.001 and 1000000, got 1e-300"),
        (["--hardware", A100, "--kv-tokens", "8"], "--kv-tokens must be between 16 and 100000000, got 8"),
        (["--hardware", A100, "--ttft-slo", "0"], "--ttft-slo must be above 0"),
        (["--hardware", A100, "--tpot-slo", "0.0001"], "--tpot-slo"),
    ],
)
def test_bad_input_is_one_line(online: Path, offline: Path, options: list[str], message: str) -> None:
    given = [option.format(online=online) for option in options]
    done = run_cli_here("simulate", "run", "--online", str(online), "--offline", str(offline), *given)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
