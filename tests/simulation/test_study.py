from __future__ import annotations

import io
import multiprocessing
import threading

import pytest
from rich.console import Console

from backfill.cli.studies import live_progress
from backfill.core.errors import ConfigError
from backfill.simulation.goodput import Goodput
from backfill.simulation.processes import Progress, RunShare, processes
from backfill.simulation.study import check_names, run_study
from tests.api.servers import wait_until
from tests.simulation.partial_runs import run_in_part


@pytest.mark.parametrize("num_processes", [1, 2])
def test_results_come_in_the_order_of_the_work(num_processes: int) -> None:
    progress = Progress()
    with processes(num_processes, progress) as map_runs:
        assert list(map_runs(run_in_part, range(-5, 0))) == [5, 4, 3, 2, 1]
    assert not multiprocessing.active_children()
    assert progress.num_done == pytest.approx(5 * 0.75), "of the runs in all processes"
    RunShare().note(1.0)  # of no sweep
    assert progress.num_done == pytest.approx(5 * 0.75)


def test_progress_is_read_though_a_process_ended_with_its_lock() -> None:
    progress, seen = Progress(), list[float]()
    reader = threading.Thread(target=lambda: seen.append(progress.num_done), daemon=True)
    with progress.value.get_lock():
        reader.start()
        reader.join(5.0)
        assert seen == [0.0]


def test_progress_is_drawn_on_a_terminal_only() -> None:
    screen = io.StringIO()
    with live_progress(Console(file=screen, force_terminal=True, width=80), 4) as progress:
        assert progress is not None
        with processes(1, progress):
            RunShare().note(7.0)
            RunShare().note(0.5)
        wait_until(lambda: "37.5 %" in screen.getvalue(), "progress")
    assert "4 runs" in screen.getvalue()
    piped = io.StringIO()
    with live_progress(Console(file=piped), 4) as progress:
        assert progress is None
    assert not piped.getvalue()


def test_a_block_that_raises_ends_its_processes() -> None:
    def interrupted() -> None:
        with processes(2) as map_runs:
            assert next(map_runs(abs, range(-100, 0))) == 100
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not multiprocessing.active_children()


@pytest.mark.slow  # how processes end: test_a_block_that_raises_ends_its_processes
def test_an_error_in_another_process_is_raised_here() -> None:
    sweep = Goodput(workloads="code", loads="0.5", num_for_capacity=1)
    with pytest.raises(ConfigError, match="1 requests are too few to measure a capacity"):
        run_study(sweep, num_processes=2)


def test_names_and_numbers_are_checked() -> None:
    check_names("models", ["a", "b"], ["a", "b", "c"])
    with pytest.raises(ConfigError, match="`models`: there is no 'd'; there are a, b"):
        check_names("models", ["a", "d"], ["a", "b"])
    with pytest.raises(ConfigError, match="`models` names none; there are a, b"):
        check_names("models", [], ["a", "b"])
    study = Goodput(policies="slo, fcfs,slo", loads="0.5,1,0.5")
    assert (study.all_policies, study.numbers("loads")) == (("slo", "fcfs"), (0.5, 1.0))
    for value in ("0.0", "-1", "1e-300", "inf", "nan"):
        with pytest.raises(ConfigError, match=r"`cvs` must be (between 0.001 and 1000000|finite)"):
            Goodput(cvs=f"1,{value}").numbers("cvs")
