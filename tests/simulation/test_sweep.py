from __future__ import annotations

import multiprocessing

import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.goodput import GoodputSweep, run_goodput
from backfill.simulation.sweep import check_names, check_positive, processes


@pytest.mark.parametrize("num_processes", [1, 2])
def test_results_come_in_the_order_of_the_work(num_processes: int) -> None:
    with processes(num_processes) as pool:
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    assert not multiprocessing.active_children()


def test_a_block_that_raises_ends_its_processes() -> None:
    def interrupted() -> None:
        with processes(2) as pool:
            assert next(pool.map(abs, range(-100, 0))) == 100
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not multiprocessing.active_children()


def test_an_error_in_another_process_is_raised_here() -> None:
    sweep = GoodputSweep(workloads=("code",), loads=(0.5,), num_for_capacity=1)
    with pytest.raises(ConfigError, match="1 requests are too few to measure a capacity"):
        run_goodput(sweep, num_processes=2)


def test_names_and_numbers_are_checked() -> None:
    check_names("models", ["a", "b"], ["a", "b", "c"])
    with pytest.raises(ConfigError, match="`models`: there is no 'd'; there are a, b"):
        check_names("models", ["a", "d"], ["a", "b"])
    with pytest.raises(ConfigError, match="`models` names none; there are a, b"):
        check_names("models", [], ["a", "b"])
    check_positive(rates=0.1)
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"`rates` must be (above 0|finite), got"):
            check_positive(rates=value)
