"""A replay on the wall clock in which requests arrive inside steps."""

from __future__ import annotations

import math
import threading

from backfill.core.clock import WallClock
from backfill.engine.engine import Engine
from backfill.simulation.replay import Replay, ReplayResult, Workload

_LONGEST_WAIT_S = 0.5  # then the thread's failure is looked for


class LiveReplay(Replay):
    """See ``Replay``. Online requests arrive from a thread of their own, as in the engine process."""

    def __init__(self, engine: Engine, clock: WallClock, workload: Workload) -> None:
        super().__init__(engine, clock, workload)
        self._has_arrived, self._is_over = threading.Event(), threading.Event()
        self._failure: Exception | None = None

    def run(self) -> ReplayResult:
        """Raises: RuntimeError if a request could not arrive."""
        thread = threading.Thread(target=self._deliver_all, name="arrivals", daemon=True)
        thread.start()
        try:
            return super().run()
        finally:
            self._is_over.set()
            thread.join()

    def _deliver_all(self) -> None:
        try:
            while (at_s := self.next_at_s()) < math.inf:
                if self._is_over.wait(max(0.0, at_s - self._clock.now_s())):
                    return
                self.deliver()
                self._has_arrived.set()
        except Exception as error:
            self._failure = error

    def _take_arrivals(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a request could not arrive") from self._failure

    def _wait_for_arrival(self) -> None:
        self._has_arrived.wait(_LONGEST_WAIT_S)
        self._has_arrived.clear()
