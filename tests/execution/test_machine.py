"""What of the machine other processes use."""

from __future__ import annotations

import os
from itertools import count
from types import SimpleNamespace

import pytest

from backfill.execution import machine
from backfill.execution.machine import OthersMeter


def test_the_processes_of_ranks_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each second one processor works, half of it for each of two processes."""
    seconds, looks, of_rank = count(), count(), {1: count(), 2: count()}

    def times() -> SimpleNamespace:
        return SimpleNamespace(
            elapsed=next(seconds), user=0.0, system=0.0, children_user=0.0, children_system=0.0
        )

    monkeypatch.setattr(os, "times", times)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "_processor_seconds", lambda: [next(looks), *[0.0] * 7])
    monkeypatch.setattr(machine, "_used_seconds", lambda pid: 0.5 * next(of_rank[pid]))
    assert OthersMeter().share() == 0.5
    assert OthersMeter([1]).share() == 0.25
    assert OthersMeter([1, 2]).share() == 0.0


def test_what_a_process_uses_is_read_from_the_system() -> None:
    used = os.times()
    assert machine._used_seconds(os.getpid()) == pytest.approx(used.user + used.system, abs=0.5)
    assert machine._used_seconds(0) == 0.0
