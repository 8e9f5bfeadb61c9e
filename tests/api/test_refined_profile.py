"""A server that starts with a coarse profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from backfill.costs.profile import CostProfile
from tests.api.servers import RunningServer, quick_profile, small_server, wait_until
from tests.costs.test_refine import scaled

BODY: dict[str, Any] = {"prompt": [5] * 40, "max_tokens": 40, "ignore_eos": True}


def quality(server: RunningServer) -> set[str]:
    names = ("coarse", "refined", "full")
    return {name for name in names if server.metric("backfill:cost_profile_info", quality=name)}


def test_a_coarse_profile_refuses_no_request_and_is_refined(small_model: Path, tmp_path: Path) -> None:
    good = CostProfile.load(Path(quick_profile(str(small_model), "--dtype", "float32", "--threads", "1")))
    coarse = replace(good, quality="coarse", cost=scaled(good.cost, 50.0, 50.0))
    named = tmp_path / "coarse.json"
    coarse.save(named)
    options = ("--profile", str(named), "--tpot-slo", "0.000001")
    with small_server(small_model, *options, data_dir=tmp_path) as server:
        assert quality(server) == {"coarse"}
        assert server.metric("backfill:cost_profile_error_ratio", quantile="0.95") == coarse.error.p95
        assert "error" not in server.logged("steps are predicted with a coarse cost profile")
        assert server.logged("`tpot_slo` 1e-06: one request alone needs")
        answer = server.http.post("/v1/completions", json={**BODY, "slo": {"ttft": 1e-6}})
        assert answer.status_code == 200, answer.text
        assert answer.json()["metrics"]["ttft_slo_met"] is False
        wait_until(lambda: quality(server) == {"refined"}, "the profile to be refined")
        assert server.metric("backfill:cost_profile_error_ratio", quantile="0.5") > 0
        text = server.http.get("/metrics").text
        assert 'inter_token_latency_seconds_bucket{class="online",engine="0",le="1e-06"' in text
    assert CostProfile.load(named) == coarse, "the user's file is not changed"
