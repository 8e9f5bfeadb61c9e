from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from backfill.ipc.child import ChildProcess, abandon_children


def sleep_long(*_: str) -> None:
    time.sleep(600)


def test_children_that_are_abandoned_leave_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        running, unstarted = (ChildProcess("test", sleep_long, ()) for _ in range(2))
        running.start()
        pid = running.pid
        assert pid is not None
        assert len(list(tmp_path.iterdir())) == 2
        abandon_children()
        assert list(tmp_path.iterdir()) == []
        async with asyncio.timeout(60):
            assert await running.receive() is None
        for child in (running, unstarted):
            await child.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(run())
