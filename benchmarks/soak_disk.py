"""A disk that is full or hangs on demand, for the folder of one server (``soak_disk.cpp``)."""

from __future__ import annotations

import enum
import mmap
import os
import subprocess
import sys
from pathlib import Path

_CONTROL_BYTES = 4096


class DiskMode(enum.IntEnum):
    PASS = 0
    FULL = 1
    HANG = 2


class Disk:
    """The state of the disk below ``folder``, for processes started with ``environment``.

    Args:
        workplace: where the library and its control file lie; outside ``folder``.
    Raises: SystemExit when the library cannot be compiled.
    """

    def __init__(self, folder: Path, workplace: Path) -> None:
        library, control = workplace / "soak_disk.so", workplace / "disk_control"
        source = Path(__file__).with_name("soak_disk.cpp")
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, "-O2", "-shared", "-fPIC", "-std=c++17", "-o", str(library), str(source), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        control.write_bytes(bytes(_CONTROL_BYTES))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _CONTROL_BYTES)
        self.environment = {
            "LD_PRELOAD": str(library),
            "SOAK_DISK_FOLDER": str(folder.resolve()),
            "SOAK_DISK_CONTROL": str(control),
        }

    def set(self, mode: DiskMode) -> None:
        self._map[0:4] = int(mode).to_bytes(4, sys.byteorder)

    @property
    def num_calls(self) -> int:
        """Calls that have failed or waited."""
        return int.from_bytes(self._map[4:8], sys.byteorder)
