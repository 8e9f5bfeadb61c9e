"""How log lines begin, in all processes: with the time, the level, and which process writes."""

from __future__ import annotations

import os

# Inherited by all processes of a replica.
_REPLICA_VARIABLE = "BACKFILL_REPLICA"


def name_replica(number: int) -> None:
    """From now on lines of this process, and of those that it starts, have the replica's number."""
    os.environ[_REPLICA_VARIABLE] = str(number)


def log_format(program: str) -> str:
    """For ``logging``: each line names ``program``, and the replica that it is of, if there are several."""
    number = os.environ.get(_REPLICA_VARIABLE)
    name = program if number is None else f"replica {number} {program}"
    return f"%(asctime)s %(levelname)s {name}: %(message)s"
