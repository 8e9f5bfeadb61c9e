"""A real PostgreSQL server, with the programs of the wheel ``pgserver``.

Its Python interface makes a system user and changes the modes of folders where it runs as root; here the
programs run as an existing user, in a folder of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tests.api.servers import TIMEOUT_S

# A crash of the machine loses only a test's data.
_SETTINGS = (
    "fsync=off",
    "full_page_writes=off",
    "max_connections=200",
    "shared_buffers=32MB",
    "log_min_messages=panic",
)


class PostgresServer:
    """Listens on a Unix socket in its folder. ``stop`` and ``start`` may be repeated; end with ``close``."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="backfill-pg-", dir="/tmp"))  # a socket's path is short
        self._user: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:  # which PostgreSQL refuses
            user = _other_user()
            self._user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self._programs = self._find_programs()
        self._run("initdb", "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-locale", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@/postgres?host={self.folder}"

    def new_schema(self) -> str:
        """The URL of an empty schema: to its user a database of its own, which takes less time and disk."""
        name = f"test{next(self._numbers)}"
        engine = create_engine(self.url)
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {name}"))
        engine.dispose()
        return f"{self.url}&options=-csearch_path%3D{name}"

    def start(self) -> None:
        """Returns once it answers."""
        settings = [argument for setting in _SETTINGS for argument in ("-c", setting)]
        arguments = [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder, "-h", ""]
        self._process = subprocess.Popen([*arguments, *settings], cwd="/", **self._user)
        engine = create_engine(self.url)
        ends_at_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                engine.connect().close()
            except OperationalError:
                assert self._process.poll() is None and time.monotonic() < ends_at_s
                time.sleep(0.02)
            else:
                engine.dispose()
                return

    def stop(self) -> None:
        """At once, as a crash would: connections break."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(TIMEOUT_S)
            self._process = None

    def freeze(self) -> None:
        """Answer nothing, and keep connections open, until ``thaw``."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def close(self) -> None:
        self.thaw()
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal_all(self, number: signal.Signals) -> None:
        if self._process is not None:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            for process_id in (self._process.pid, *map(int, children.split())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, number)

    def _run(self, program: str, *arguments: str) -> None:
        command = [self._programs / program, "-D", self.folder / "data", *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)

    def _find_programs(self) -> Path:
        """The folder of the programs; a copy where the user may not read the wheel's."""
        spec = importlib.util.find_spec("pgserver")
        assert spec is not None and spec.origin is not None, "pip install pgserver"
        package = Path(spec.origin).parent
        programs = package / "pginstall" / "bin"
        try:
            subprocess.run(
                [programs / "postgres", "--version"], check=True, capture_output=True, cwd="/", **self._user
            )
        except (OSError, subprocess.CalledProcessError):
            copy = self.folder / package.name
            shutil.copytree(package / "pginstall", copy / "pginstall")
            libraries = package.with_name(
                f"{package.name}.libs"
            )  # the programs look for them beside the package
            shutil.copytree(libraries, self.folder / libraries.name)
            programs = copy / "pginstall" / "bin"
            self.folder.chmod(0o755)
        return programs


def _other_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        return next(user for user in pwd.getpwall() if user.pw_uid != 0)
