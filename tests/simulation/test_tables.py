"""Tables of figures on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from backfill.simulation.tables import print_figures

KEYS = ["ttft_p99_s", "offline_tok_s", "recomputed_token_share"]
NAMES = ["TTFT P99 s", "offline tok/s", "recomputed"]
POLICIES = {
    name: dict(zip(KEYS, (1.234 + index, 3124 + index, index / 10), strict=True))
    for index, name in enumerate(
        (
            "online-only",
            "priority",
            "priority (paper)",
            "slo-recompute-latest",
            "slo-swap",
            "slo",
            "slo (paper)",
        )
    )
}


@pytest.mark.parametrize("width", [40, 60, 80, 150])
def test_every_figure_is_whole_and_no_line_is_too_long(width: int) -> None:
    screen = io.StringIO()
    print_figures(Console(file=screen, width=width), "rate_per_s 2, cv 1", " ".join(KEYS), POLICIES)
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for ttft_s, tok_s, share in (figures.values() for figures in POLICIES.values()):
        for cell in (f"{ttft_s:.3f}", f"{tok_s:.0f}", f"{share:.2%}"):
            assert f" {cell} " in text
    for name in NAMES:
        assert f" {name} " in text


def test_one_table_where_there_is_room() -> None:
    screen = io.StringIO()
    print_figures(Console(file=screen, width=150), "", " ".join(KEYS), POLICIES)
    assert screen.getvalue().count("TTFT P99 s") == 1


def test_a_figure_that_nobody_has_has_no_row() -> None:
    screen = io.StringIO()
    print_figures(
        Console(file=screen, width=80),
        "",
        " ".join(KEYS),
        {"slo": {"ttft_p99_s": 1.0}, "fcfs": {"offline_tok_s": 5}},
    )
    assert "offline tok/s" in screen.getvalue()
    assert "recomputed" not in screen.getvalue()
