"""Words that processes share."""

from __future__ import annotations

import threading

import pytest

from backfill.core.errors import BackfillError
from backfill.parallel.shared_memory import Barrier, StopWords


def test_a_barrier_opens_when_all_have_come() -> None:
    barrier = Barrier(2)
    thread = threading.Thread(target=barrier.wait, args=(0,))
    thread.start()
    barrier.wait(1)
    thread.join(60)
    assert not thread.is_alive()
    barrier.close()


def test_a_barrier_names_those_who_do_not_come() -> None:
    barrier = Barrier(3)
    with pytest.raises(BackfillError, match=r"Rank 1 has waited 0\.01 s for these ranks to .* load: 0, 2\."):
        barrier.wait(1, timeout_s=0.01)
    barrier.close()


def test_a_stop_of_an_earlier_step_does_not_undo_a_later_one() -> None:
    words = StopWords(num_words=2)
    words.request(4)
    words.request(2)
    assert [step for step in range(8) if words.is_requested(step)] == [4]
    words.close()
