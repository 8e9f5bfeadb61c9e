"""Work for processes of their own; imports little, so that they begin soon."""

from __future__ import annotations

from backfill.simulation.processes import RunShare


def run_in_part(number: int) -> int:
    """Three quarters of a run; progress that goes back does not count."""
    share = RunShare()
    for done in (0.25, 0.5, 0.25, 0.75):
        share.note(done)
    return abs(number)
