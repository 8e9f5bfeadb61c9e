"""What commands do before their engine starts. Light to import, so that an engine can start at once."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import logging
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from backfill.cli.interrupts import LOADING, take_from_loop
from backfill.cli.standard_streams import print_if_read
from backfill.core.errors import ConfigError
from backfill.ipc.log_lines import log_format

if TYPE_CHECKING:
    from backfill.engine.options import ModelOptions
    from backfill.http.config import ServerConfig
    from backfill.http.keys import ApiKeys
    from backfill.jobs.config import JobsConfig
    from backfill.protocol.preparer import ServedModel

Result = TypeVar("Result")

_IMPORTED_AT_S = time.monotonic()
_TINY_CONTEXT = 128
_PNG = b"\x89PNG\r\n\x1a\n"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # of all of a machine's addresses, one to ask
_BACKLOG = 4096  # load generators open all connections at once


def find_folder(options: ModelOptions) -> Path:
    """The model's folder; fetches the model where needed.

    Raises: ModelError for a model that cannot be served.
    """
    from backfill.models.config import ModelConfig
    from backfill.models.resolve import resolve_model

    folder = resolve_model(options.model, revision=options.revision)
    ModelConfig.from_folder(folder)  # refused before anything starts
    return folder


def jobs_of(server: ServerConfig, jobs: JobsConfig) -> JobsConfig:
    """The batches of a server: a line may be as large as an online body, and any file as a batch's."""
    return replace(
        jobs,
        data_dir=jobs.data_dir.expanduser(),
        max_line_bytes=server.max_body_bytes,
        max_file_bytes=max(jobs.batch_max_bytes, jobs.max_file_bytes),
    )


def check_data_dir(config: JobsConfig, url: str) -> None:
    """Refuse a data folder, or a store that is named beside it, that cannot be used, before anything slow.

    The server takes them later, once its engine is launched.

    Args:
        url: of the server, shown to a process that finds the data folder locked meanwhile.
    Raises: ConfigError.
    """
    from backfill.jobs.private_files import DataFolderLock, check_writable

    if not config.batch_api:
        check_writable(config.data_dir)
    elif config.batch_database_url is not None or config.batch_file_store is not None:
        check_storage(config, url)
    else:  # without its database, whose library takes half a second to load
        lock = DataFolderLock(config.data_dir, url)
        lock.acquire()
        lock.release()


def check_storage(config: JobsConfig, url: str) -> None:
    """Refuse a data folder, a database or a place of files that cannot be used, before an engine loads.

    Args:
        url: of the server, shown to a process that finds the data folder locked meanwhile.
    Raises: ConfigError.
    """
    from backfill.jobs.private_files import DataFolderLock
    from backfill.jobs.storage import check_usable

    lock = DataFolderLock(config.data_dir, url)
    lock.acquire()
    try:
        asyncio.run(check_usable(config))
    finally:
        lock.release()


def served_model(model: str, folder: Path, names: tuple[str, ...]) -> ServedModel:
    """The model as clients name it: by ``names``, else by what it is called."""
    from backfill.protocol.preparer import ServedModel

    return ServedModel(
        names=names or (_default_name(model),),
        root=model if _is_hub_id(model) else str(folder),
        folder=folder,
        created=int(time.time()),
    )


def configure_logging(level: str, program: str) -> None:
    """Log to standard error; each line names ``program``."""
    logging.basicConfig(level=level.upper(), format=log_format(program), stream=sys.stderr)
    for noisy in ("alembic", "httpx", "huggingface_hub", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # warns of every malformed body


def run_in_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on uvloop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def run_server(serving: Coroutine[Any, Any, signal.Signals | None]) -> None:
    """Run a server in a loop of its own.

    Args:
        serving: returns the signal that ended it before it was ready, if one did.
    Raises: SystemExit with the status of that signal.
    """

    async def run() -> signal.Signals | None:
        try:
            return await serving
        finally:
            take_from_loop(asyncio.get_running_loop())

    stopped_by = run_in_loop(run())
    if stopped_by is not None:
        print(f"backfill: {LOADING}", file=sys.stderr)
        raise SystemExit(128 + stopped_by)


def counted(number: int, noun: str) -> str:
    """Such as "1 engine" and "2 engines"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def process_age_s() -> float:
    """Seconds since this process began; where the system has no /proc, since this module was imported.

    What a shell did before it replaced itself by this program counts.
    """
    try:
        # After the name, which is in brackets and may have some, come the fields from the third on (proc(5)).
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began_at_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_at_s
    except (OSError, AttributeError, IndexError, ValueError):
        return time.monotonic() - _IMPORTED_AT_S


def announce(what: str, address: Address, max_model_len: int) -> None:
    """Print what is served, and a request to copy. Args: max_model_len: 0 where it is not known."""
    example = first_request(address.url, max_model_len, asks_for_keys=address.keys is not None)
    print_if_read(f"\n{what}\n{example}")


def first_request(url: str, max_model_len: int, *, asks_for_keys: bool) -> str:
    """A request to copy. Args: max_model_len: 0 where it is not known."""
    if 0 < max_model_len < _TINY_CONTEXT:  # a chat template alone may be longer
        path = "/v1/completions"
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": max(1, min(16, max_model_len // 2))}
    else:
        path = "/v1/chat/completions"
        messages = [{"role": "user", "content": "What is gravity?"}]
        body = {"messages": messages, "temperature": 0.2}
    target = f"{url}{path}"
    if "+unix://" in url:
        scheme, _, socket_path = url.partition("+unix://")
        target = f"--unix-socket {socket_path} {scheme}://localhost{path}"
    # A key would be shown to whoever reads the log.
    key_header = ' -H "Authorization: Bearer $KEY"' if asks_for_keys else ""
    lines = [
        "Try, with an API key in KEY:" if asks_for_keys else "Try:",
        f"curl {target} -H 'Content-Type: application/json'{key_header} \\",
        f"  -d '{json.dumps(body)}'",
        "",
    ]
    return "\n".join(lines)


class Address(NamedTuple):
    """Where a server listens, and who may ask it.

    Attributes:
        url: that a client on this machine can ask.
        keys: None where anyone may.
    """

    listener: socket.socket
    url: str
    keys: ApiKeys | None

    @property
    def place(self) -> str:
        """The URL, for people; it says so where the server listens on others too, and answers anyone."""
        is_anywhere = self.listener.family != socket.AF_UNIX and self.listener.getsockname()[0] in _LOOPBACK
        if not is_anywhere:
            return self.url
        for_whom = " for anyone, without a key" if self.keys is None else ""
        return f"{self.url} and all other addresses of this machine{for_whom}"


def listen(server: ServerConfig) -> Address:
    """Bind the port before anything slow, so that a port in use fails at once. Raises: ConfigError."""
    from backfill.http.keys import ApiKeys

    keys = ApiKeys(server.api_key, server.api_key_file) if server.asks_for_keys else None
    _check_certificate(server)
    if server.otlp_traces_endpoint is not None:
        from backfill.api.tracing import check_packages

        check_packages()
    scheme = "http" if server.certificate is None else "https"
    if server.uds is not None:
        return Address(_bind_path(server.uds), f"{scheme}+unix://{server.uds.absolute()}", keys)
    listener = bind(server.host, server.port, shares_port=server.shares_port)
    host, port = listener.getsockname()[:2]
    host = _LOOPBACK.get(host, host)
    return Address(listener, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", keys)


def _check_certificate(server: ServerConfig) -> None:
    """Raises: ConfigError."""
    if server.certificate is None:
        return
    certfile, keyfile = server.certificate
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Nobody is asked for the key's password, as nobody is there when a service starts.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except OSError as error:
        option, file, what = _wrong_certificate(certfile, keyfile, error)
        raise ConfigError(f"`{option}` {file} cannot be used: {what}.") from error


def _wrong_certificate(certfile: Path, keyfile: Path | None, error: OSError) -> tuple[str, Path, str]:
    """The option and the file that are wrong, and what is: OpenSSL's errors name neither."""
    of_certificate = "ssl_certfile", certfile
    of_key = of_certificate if keyfile is None else ("ssl_keyfile", keyfile)
    for (option, file), pattern, kind in (
        (of_certificate, rb"-BEGIN (X509 |TRUSTED )?CERTIFICATE-", "certificate"),
        (of_key, rb"-BEGIN ([A-Z]+ )*PRIVATE KEY-", "private key"),
    ):
        try:
            text = file.read_bytes()
        except OSError as unreadable:
            return option, file, unreadable.strerror or str(unreadable)
        if re.search(pattern, text) is None:
            elsewhere = "; `ssl_keyfile` names its file" if kind == "private key" and keyfile is None else ""
            return option, file, f"it holds no {kind} in PEM form{elsewhere}"
    if b"ENCRYPTED" in text:
        return *of_key, "its private key is encrypted, and nobody is asked for a password"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return *of_key, f"its private key is not that of the certificate in {certfile}"
    of_both = "" if keyfile is None else f" with `ssl_keyfile` {keyfile}"
    why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return *of_certificate, f"OpenSSL refuses it{of_both}: {why or error}"


def _bind_path(path: Path) -> socket.socket:
    """Listen at a path, in place of a socket that nobody listens on. Raises: ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) != errno.ECONNREFUSED:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"`uds` {path}: {error.strerror or error}.") from error
    return listener


def bind(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = " Another one: --port." if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}.{hint}") from error
    return listener


def check_plot(path: Path | None) -> None:
    """Raises: ConfigError for a plot that cannot be drawn or written, or whose file is of another kind."""
    if path is None:
        return
    try:
        may_be_written = not path.exists() or _may_be_replaced(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.", field="plot") from error
    if not may_be_written:
        raise ConfigError(f"{path} exists and is no PNG; give another file.", field="plot")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(
            "`plot` needs matplotlib, which is not installed: pip install 'backfill[plot]'."
        ) from None
    check_folder("plot", path)


def _may_be_replaced(path: Path) -> bool:
    """Whether it is a PNG or empty. Raises: OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_PNG)) in (b"", _PNG)


def check_folder(field: str, path: Path | None) -> None:
    """Raises: ConfigError naming ``field`` when the file's folder is missing or not writable."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"`{field}` {path} cannot be written: there is no folder {path.parent}.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"`{field}` {path} cannot be written: the folder {path.parent} is not writable.")


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not Path(model).exists()


def _default_name(model: str) -> str:
    """What clients call the model: a known name or hub id as given, else the folder's or file's name."""
    path = Path(model)
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model
