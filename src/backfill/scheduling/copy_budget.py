"""How many KV blocks may be copied beside a step (ConServe, section 4.5).

The paper "uses the SLO to decide the maximum number of KV cache blocks that can be swapped in the background,
and defers the extra blocks to the next round".
"""

from __future__ import annotations

import math
from typing import NamedTuple

# A step that computes nothing waits for copies. No more begin than the link moves in this time, so that the
# copies of a request that arrives meanwhile do not queue for longer.
_IDLE_STEP_S = 0.05


class CopyLimits(NamedTuple):
    """Most copies that may be in flight while copies of a kind begin.

    Attributes:
        online: restores for online requests. Their KV is what an objective waits for, so they are limited by
            the link alone.
        background: restores for offline requests, and checkpoints.
    """

    online: int
    background: int


def copy_limits(step_s: float, slack_s: float, block_copy_s: float, interference: float) -> CopyLimits:
    """Copies that the link can move beside a step, and those whose slow-down the step can afford.

    A copy that does not end with its step also slows the next one, and counts there as in flight.

    Args:
        step_s: predicted time of the step without copies; 0 if it computes nothing.
        slack_s: seconds by which it could be longer; inf where no objective bounds it. Below 0 is as 0.
        block_copy_s: seconds that the copy of one block takes.
        interference: seconds by which a step becomes longer for each second of copying beside it; 0 where
            that was not measured. Then copies count as free.
    """
    link = math.ceil((step_s or _IDLE_STEP_S) / block_copy_s)
    slowdown_s = block_copy_s * interference  # of each block
    slack_s = max(0.0, slack_s)
    if step_s == 0.0 or slack_s >= link * slowdown_s:
        return CopyLimits(link, link)
    return CopyLimits(link, math.floor(slack_s / slowdown_s))
