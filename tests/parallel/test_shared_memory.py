"""Words that processes share."""

from __future__ import annotations

import os
import threading
import time

import pytest

from backfill import _shared_memory  # type: ignore[attr-defined]
from backfill.core.errors import BackfillError
from backfill.parallel.shared_memory import Barrier, Signals, StopWords, create_memory, map_memory


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


def test_a_wait_for_a_counter_leaves_the_interpreter_to_other_threads() -> None:
    fd = create_memory(Signals.num_bytes(2, 0))
    ends = [_shared_memory.Signals(map_memory(fd), rank, 2, 0) for rank in range(2)]
    os.close(fd)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(ends[0].wait_for(1, 5, 60.0)))
    thread.start()
    began = time.monotonic()
    ends[1].raise_to(4)
    ends[1].raise_to(5)
    thread.join(60)
    assert found == [True]
    assert time.monotonic() - began < 30.0
    assert not ends[1].wait_for(0, 1, 0.001)
