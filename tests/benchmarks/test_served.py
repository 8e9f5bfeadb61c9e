from __future__ import annotations

import subprocess
import sys

import pytest
import served


def test_the_words_of_a_server_that_does_not_start_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(SystemExit, match="backfill serve ended with 2"),
        served.served("--no-such-option"),
    ):
        pass
    assert "Unknown option" in capfd.readouterr().err


def test_waiting_for_a_server_has_an_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(SystemExit, match=r"not ready within 0.2 s"):
            served.wait_until_ready(process, served.free_port(), 0.2)
    finally:
        served.stop(process)
    assert process.returncode is not None
