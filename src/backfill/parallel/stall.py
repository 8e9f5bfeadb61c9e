"""Notices that ranks stand still in a step, and says which of them and where.

A rank hangs in a kernel that never ends, or is stopped; the others then wait for it in an exchange, without
end. How long a whole step takes says little, since a long prefill takes long. So what counts is the time in
which no rank gets on by a layer or an exchange (``shared_state.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from backfill.parallel.shared_state import Position

_MIN_LIMIT_S = 15.0
_LIMIT_STEPS = 10.0
_LIMIT_WITHOUT_PREDICTION_S = 150.0
_MAX_LOOK_S = 0.5
_MAX_UNWATCHED_S = 10.0


def stall_limit_s(engine_hang_timeout: float | None, predicted_s: float) -> float:
    """Seconds without progress in a step, after which its ranks count as hanging; infinite for never.

    Half of what the engine's client allows the engine (``engine/hang.py``), so that the reason is known.

    Args:
        engine_hang_timeout: as configured.
        predicted_s: the step's time; 0 without a prediction.
    """
    if engine_hang_timeout is not None:
        return engine_hang_timeout / 2 or math.inf
    if predicted_s == 0:
        return _LIMIT_WITHOUT_PREDICTION_S
    return max(_MIN_LIMIT_S, _LIMIT_STEPS * predicted_s)


def unwatched_s(engine_hang_timeout: float | None) -> float:
    """Seconds at most for which nobody looks after ranks in a step, while an arrival may end the wait for it.

    With ``stall_limit_s`` it is less than the engine's client allows the engine.
    """
    return min(_MAX_UNWATCHED_S, engine_hang_timeout / 4) if engine_hang_timeout else _MAX_UNWATCHED_S


class StallWatch:
    """Counts for how long nothing has changed.

    A look counts for ``_MAX_LOOK_S`` at most: a pause of this process, which may be one of the whole machine,
    is not taken for one of the ranks.

    Attributes:
        still_s: seconds without a change.
    """

    def __init__(self, now_s: float) -> None:
        self.still_s = 0.0
        self._looked_at_s = now_s
        self._seen: object = None

    def look(self, state: object, now_s: float) -> None:
        """To be called several times a second. ``state`` is other than before if a rank has got on."""
        since_s, self._looked_at_s = now_s - self._looked_at_s, now_s
        self.still_s = self.still_s + min(since_s, _MAX_LOOK_S) if state == self._seen else 0.0
        self._seen = state


def describe_positions(step: int, waiting: Sequence[int], positions: Sequence[Position]) -> str:
    """Where the ranks are that have not reported a step, those first that wait for no other.

    Args:
        positions: by rank.
    """
    ordered = sorted(waiting, key=lambda rank: positions[rank].exchanges)
    return "; ".join(f"rank {rank} {_where(step, positions[rank])}" for rank in ordered)


def _where(step: int, position: Position) -> str:
    if position.step != step:
        return "has not begun it"
    where = "before its first layer" if position.layer < 0 else f"in layer {position.layer}"
    return f"waits for others {where}" if position.exchanges else f"stands still {where}"
