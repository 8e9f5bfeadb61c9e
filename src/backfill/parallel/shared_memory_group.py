"""Sums over the ranks of one machine through shared memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backfill import _shared_memory  # type: ignore[attr-defined]
from backfill.execution.collectives import PeerFailed
from backfill.ipc.python_process import is_running
from backfill.parallel.shared_state import RankProgress

CLOSED = 2**62  # the counter of a rank that has ended
_ALIVE_CHECK_S = 0.25
# Words of a rank: rank 0's answers, one for each half; steps that failed, at their number modulo so many.
# That is more than a rank may be ahead of another, which has not seen the failure yet.
_STOP, _FAILED, _NUM_FAILED = 0, 2, 64
_NUM_WORDS = _FAILED + _NUM_FAILED
_STEP = 1 << 24  # counts in a step, at most
_PART_BYTES = 1 << 20


class Signals:
    """A counter and some words for each rank; each rank writes its own.

    A wait looks a few times, then yields, then sleeps, so that ranks that share cores do not slow down the
    one they wait for. What a rank has written before it raises its counter is seen by those who see the
    counter.

    Args:
        memory: zeros when the first rank comes; ``num_bytes`` of it are used.
        num_words: words of each rank for the user of this.
        progress: of this rank, which shows that it waits.
    """

    def __init__(
        self, memory: memoryview, rank: int, size: int, num_words: int, progress: RankProgress
    ) -> None:
        self._cpp = cpp = _shared_memory.Signals(memory, rank, size, num_words)
        self._progress = progress
        self.count, self.raise_to = cpp.count, cpp.raise_to
        self.word, self.set_word = cpp.word, cpp.set_word

    @staticmethod
    def num_bytes(size: int, num_words: int) -> int:
        return int(_shared_memory.Signals.num_bytes(size, num_words))

    def wait_for(self, rank: int, value: int) -> None:
        """Until the rank's counter has reached ``value``. Raises: PeerFailed if its process has ended."""
        with self._progress.exchanging():
            while not self._cpp.wait_for(rank, value, _ALIVE_CHECK_S):
                pid = self._cpp.pid(rank)  # 0 before the rank has come
                if pid and not is_running(pid) and self.count(rank) < value:
                    raise PeerFailed(f"the process of rank {rank} (pid {pid}) has ended")

    def close(self) -> None:
        """Everyone who waits for this rank goes on, now and later."""
        self.raise_to(CLOSED)


class SharedMemoryGroup:
    """See ``SafepointGroup``. Every rank writes its part, waits for the others', and adds all of them up.

    Sums are taken in the order of ranks, in float32 also for narrower types, so they are the same on all
    ranks and do not depend on timing. Parts alternate between two halves of the memory: a rank that writes
    the next part has seen that all others have read the one before the last.

    Args:
        memory: ``num_bytes`` of zeros that all ranks have mapped.
        progress: of this rank.
        part_bytes: of a tensor; a larger one is exchanged part by part.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        progress: RankProgress,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        header = Signals.num_bytes(size, _NUM_WORDS)
        self.rank = rank
        self.size = size
        self._signals = Signals(memory, rank, size, _NUM_WORDS, progress)
        self._data = torch.frombuffer(memory, dtype=torch.uint8, offset=header, count=2 * size * part_bytes)
        self._part_bytes = part_bytes
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}  # [half][rank]
        self._step = 0
        self._count = 0
        self._is_stop_asked: Callable[[], bool] | None = None
        self._stop_agreed = False
        self._has_met = True

    @staticmethod
    def num_bytes(size: int, part_bytes: int = _PART_BYTES) -> int:
        return Signals.num_bytes(size, _NUM_WORDS) + 2 * size * part_bytes

    def begin_step(self) -> None:
        self._step += 1
        self._count = self._step * _STEP
        self._has_met = False
        self.arm(None)
        self._signals.raise_to(self._count)

    def fail_step(self) -> None:
        signals = self._signals
        signals.set_word(self._failed_word, self._step)
        # The end of the step, so that no rank waits for this one in it.
        signals.raise_to((self._step + 1) * _STEP - 1)

    def arm(self, is_stop_asked: Callable[[], bool] | None) -> None:
        self._is_stop_asked = is_stop_asked
        self._stop_agreed = False

    @property
    def stop_agreed(self) -> bool:
        return self._stop_agreed

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        part_len = self._part_bytes // x.element_size()
        if len(flat) <= part_len:
            self._add_up(flat)
        else:
            for part in torch.split(flat, part_len):
                self._add_up(part)
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        num_rows, num_columns = x.shape
        whole = x.new_empty(num_rows, self.size * num_columns) if self.rank == 0 else None
        part_len = self._part_bytes // x.element_size()
        width = min(num_columns, part_len)
        height = part_len // width
        for row in range(0, num_rows, height):
            for column in range(0, num_columns, width):
                part = x[row : row + height, column : column + width]
                parts = self._exchange(part.reshape(-1))
                if whole is not None:
                    for rank, values in enumerate(parts):
                        first = rank * num_columns + column
                        target = whole[row : row + height, first : first + part.shape[1]]
                        target.copy_(values.view(part.shape))
        return whole

    def close(self) -> None:
        self._signals.close()

    def _add_up(self, x: Tensor) -> None:
        parts = self._exchange(x)
        if self.size == 2:
            x.add_(parts[1 - self.rank])  # the sum of two does not depend on their order
        elif x.dtype == torch.float32:
            torch.add(parts[0], parts[1], out=x)
            for part in parts[2:]:
                x.add_(part)
        else:
            total = parts[0].float()
            for part in parts[1:]:
                total.add_(part)
            x.copy_(total)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """The parts ``[n]`` of all ranks. They stay until the exchange after the next."""
        signals, num = self._signals, len(x)
        if not self._has_met:
            # The last exchange of the step before may have used the same half.
            self._wait_for_others(self._count)
            self._has_met = True
        self._count += 1
        half = self._count & 1
        views = self._views.get(x.dtype) or self._view_as(x.dtype)
        parts = [view[:num] for view in views[half]]
        parts[self.rank].copy_(x)
        asked = self._is_stop_asked
        if asked is not None and self.rank == 0:
            self._stop_agreed = asked()
            signals.set_word(_STOP + half, self._stop_agreed)
        signals.raise_to(self._count)
        self._wait_for_others(self._count)
        if asked is not None and self.rank != 0:
            self._stop_agreed = signals.word(0, _STOP + half) == 1
        return parts

    def _wait_for_others(self, count: int) -> None:
        signals = self._signals
        for rank in range(self.size):
            if rank == self.rank:
                continue
            signals.wait_for(rank, count)
            # A rank that failed in this step has counted on, and may be in a later step.
            if signals.word(rank, self._failed_word) == self._step:
                raise PeerFailed(f"tensor rank {rank} has failed in this step")
            if signals.count(rank) >= CLOSED:
                raise PeerFailed(f"tensor rank {rank} has ended")

    @property
    def _failed_word(self) -> int:
        return _FAILED + self._step % _NUM_FAILED

    def _view_as(self, dtype: torch.dtype) -> list[list[Tensor]]:
        parts = self._data.view(2, self.size, self._part_bytes)
        views = [[parts[half, rank].view(dtype) for rank in range(self.size)] for half in (0, 1)]
        self._views[dtype] = views
        return views
