"""Commands whose standard streams are closed, or cannot be written; a batch: tests/cli/test_run_batch.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import TIMEOUT_S


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_place_for_the_next_file(closed: str) -> None:
    script = (
        "from backfill.cli.standard_streams import open_standard_streams as open_them; open_them(); "
        "import os, sys; print(1); print(2, file=sys.stderr); sys.exit(open(os.devnull).fileno() < 3)"
    )
    command = f"exec {sys.executable} -c '{script}' {closed}"
    assert subprocess.run(["bash", "-c", command], check=False, timeout=TIMEOUT_S).returncode == 0


def test_what_nobody_can_read_ends_no_server() -> None:
    script = (
        "from backfill.cli.standard_streams import print_if_read; "
        "print_if_read(1); print_if_read(2); print(3, flush=True)"
    )
    command = f"exec {sys.executable} -c '{script}' > /dev/full"
    assert subprocess.run(["bash", "-c", command], check=False, timeout=TIMEOUT_S).returncode == 0
