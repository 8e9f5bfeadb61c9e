"""What children of these tests run; a child imports this module, and so nothing else of the tests."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from backfill.ipc.channel import open_channel
from backfill.ipc.python_process import say_last_words


def leave(status: int) -> None:
    raise SystemExit(status)


def complain(message: str) -> None:
    say_last_words(message)
    raise SystemExit(7)


def write_and_sleep(path: str) -> None:
    Path(path).write_text(os.environ.get("GREETING", ""))
    time.sleep(600)


def write_modules(path: str, names: tuple[str, ...]) -> None:
    Path(path).write_text(" ".join(name for name in names if name in sys.modules))


def sleep_long(*_: str) -> None:
    time.sleep(600)


def say_and_end(words: list[str], commands_url: str, reports_url: str) -> None:
    with open_channel("test", str, commands_url, reports_url) as channel:
        for word in words:
            channel.send(word)
    raise SystemExit(3)
