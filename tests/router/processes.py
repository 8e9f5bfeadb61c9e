"""What runs in place of a replica. Light to import."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from backfill.ipc.python_process import say_last_words
from backfill.router.replicas import ReplicaPlace


def wait_for_a_signal(path: str, fails: str, place: ReplicaPlace) -> None:
    """Ends at once where it is told to, with a reason or ``silently``."""
    if fails:
        if fails != "silently":
            say_last_words(fails)
        sys.exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path(path).write_text(str(os.getpid()))
    signal.pause()
