from __future__ import annotations

import pytest

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.scheduling.objectives import DEFAULT_SLO, achievable_slo, server_slo
from tests.builders import flat_cost


@pytest.mark.parametrize(
    ("asked", "step_s", "expected"),
    [
        ({}, None, DEFAULT_SLO),
        ({}, 0.01, DEFAULT_SLO),
        ({}, 0.1, SLO(1.0, 0.4)),
        ({}, 0.5, SLO(2.0, 2.0)),
        ({"ttft_slo_s": 3.0}, 0.1, SLO(3.0, 0.4)),
        ({"tpot_slo_s": 0.11}, 0.1, SLO(1.0, 0.11)),
        ({"ttft_slo_s": 1e-9}, None, SLO(1e-9, DEFAULT_SLO.tpot_s)),
    ],
)
def test_a_server_has_the_objectives_asked_for_and_defaults_it_can_meet(
    asked: dict[str, float], step_s: float | None, expected: SLO
) -> None:
    cost = None if step_s is None else flat_cost(step_s)
    assert server_slo(SchedulerConfig(**asked), cost) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "option"),
    [({"ttft_slo_s": 0.09}, "--ttft-slo 0.09"), ({"tpot_slo_s": 0.09}, "--tpot-slo 0.09")],
)
def test_what_one_request_alone_cannot_meet_is_refused(asked: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: one request alone needs 0.1 s"):
        server_slo(SchedulerConfig(**asked), flat_cost(0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_prompt_tokens", "num_steps"), [(1, 1), (64, 1), (65, 2), (100, 2), (129, 3)])
def test_a_prompt_is_computed_in_chunks(num_prompt_tokens: int, num_steps: int) -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=128, max_prefill_chunk_tokens=64)
    least = achievable_slo(flat_cost(0.1), config, num_prompt_tokens)
    assert least.ttft_s == pytest.approx(0.1 * num_steps)
    assert least.tpot_s == pytest.approx(0.1)
