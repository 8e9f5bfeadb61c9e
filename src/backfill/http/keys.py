"""API keys and their owners.

Only the digest of a key is stored. The owner is the key's name, or the digest if the key has no name.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.core.errors import ConfigError
from backfill.http.limits import NO_LIMITS, OwnerLimits, parse_limits

if TYPE_CHECKING:
    from starlette.datastructures import Headers

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_SENDABLE = re.compile(r"[!-~]+")  # printable ASCII: what every client can put into a header
# A text whose only "=" are its last characters is a key in padded base64 if it has this many characters
# (16 bytes). A shorter one is more likely a name whose key was left out.
_MIN_PADDED_CHARS = 24
_MAX_KEYS = 1000  # each request's key is compared with all of them
_MAX_FILE_BYTES = 1 << 20
# The key of this name speaks for the owner that a header names: a router that has checked their keys.
ROUTER_OWNER = "router"
_OTHERS = "*"  # in place of an owner's name
_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may send. ``digest`` is its SHA-256."""

    owner: str
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Attributes: limits: by owner; those of ``OTHERS`` are for owners that have none of their own."""

    keys: tuple[ApiKey, ...]
    limits: Mapping[str, OwnerLimits]


def is_sendable(key: str) -> bool:
    """Every client can put it into a header."""
    return _SENDABLE.fullmatch(key) is not None


def sent_key(headers: Headers) -> str | None:
    """The key that a request brings; None where it brings none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def parse_option(text: str) -> ApiKey:
    """The key of one ``--api-key``: ``NAME=KEY``, ``KEY``, or ``=KEY`` for a key that looks named.

    The text before the first ``=`` is the name if it is a valid name; the rest is the key. A text of 24 or
    more characters whose only ``=`` are at its end (base64) is a key without a name.

    Raises: ConfigError without a key, or for an invalid name; the message does not contain the text.
    """
    text = text.strip()
    name, equals, key = text.partition("=")
    if not text.strip("="):
        raise ConfigError("it must not be empty")
    if equals and not name:
        return _unnamed(key)
    if equals and name.split() != [name]:
        raise ConfigError("a name has no spaces; write '=KEY' for a key without a name that contains '='")
    if not equals or not _NAME.fullmatch(name):
        return _unnamed(text)
    if key.strip("="):
        return _named(name, key)
    if len(text) < _MIN_PADDED_CHARS:
        raise ConfigError("a name without a key; write '=KEY' for a key without a name that ends in '='")
    return _unnamed(text)


def parse_key_file(content: bytes) -> KeyFile:
    """A file with lines ``NAME=KEY``, and ``NAME LIMIT=VALUE ...`` or ``* LIMIT=VALUE ...``.

    Blank lines and lines that begin with ``#`` are skipped.

    Raises: ConfigError with the number of the line, never a key.
    """
    keys: dict[bytes, ApiKey] = {}
    limits: dict[str, OwnerLimits] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        try:
            match _parse_line(line):
                case ApiKey() as key:
                    _add(keys, key)
                case (owner, of_owner):
                    if owner in limits:
                        raise ConfigError(f"the limits of {owner} are given twice")
                    limits[owner] = of_owner
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from None
    return KeyFile(tuple(keys.values()), limits)


class ApiKeys:
    """The keys of the options and of a file that is read again when it changes.

    ``owner_of`` may be called while another thread reloads: it sees either the old or the new keys.

    Args:
        options: the values of ``--api-key``.
        file: the value of ``--api-key-file``.
    Raises: ConfigError with the option and the number of the file's line, never a key.
    """

    def __init__(self, options: Sequence[str], file: Path | None = None) -> None:
        fixed: dict[bytes, ApiKey] = {}
        for number, text in enumerate(options, start=1):
            try:
                _add(fixed, parse_option(text))
            except ConfigError as error:
                which = f" (number {number} of {len(options)})" if len(options) > 1 else ""
                raise ConfigError(f"`api_key`{which}: {error}.") from None
        self._fixed = tuple(fixed.values())
        self._keys = self._fixed
        self._limits: Mapping[str, OwnerLimits] = {}
        self._file = file
        self._content_digest = b""  # of the file as it was last read
        self._last_error = ""
        if file is not None:
            self._load_file(file)
        logger.info("%d API keys of %d owners", len(self._keys), len({key.owner for key in self._keys}))

    def owner_of(self, key: str) -> str | None:
        """The owner of ``key``; None for an unknown key."""
        digest = hashlib.sha256(key.encode()).digest()
        # Comparing every key in constant time keeps the response time independent of the key.
        owners = [known.owner for known in self._keys if hmac.compare_digest(digest, known.digest)]
        return owners[0] if owners else None

    def limits_of(self, owner: str) -> OwnerLimits:
        limits = self._limits  # another thread may replace it
        return limits.get(owner) or limits.get(_OTHERS, NO_LIMITS)

    def reload(self) -> None:
        """Load the keys of the file if it has changed. An invalid file is logged and changes nothing."""
        if self._file is None:
            return
        try:
            if self._load_file(self._file):
                logger.info("--api-key-file %s: loaded again; %d API keys", self._file, len(self._keys))
            self._last_error = ""
        except ConfigError as error:
            if str(error) != self._last_error:  # logged once, not at every poll
                logger.error("%s The keys are unchanged.", error)
            self._last_error = str(error)

    @contextmanager
    def watched(self, poll_s: float = _POLL_S) -> Iterator[None]:
        """Reload the file, if there is one, every few seconds until the block is left."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(poll_s):
                try:
                    self.reload()
                except Exception:
                    logger.exception("The API keys could not be loaded again")

        if self._file is not None:
            # A daemon that is never joined: a hung disk must not keep the server from ending.
            threading.Thread(target=watch, name="api-key-file", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _load_file(self, path: Path) -> bool:
        """Load the keys of the file; returns whether its content has changed. Raises: ConfigError."""
        content, mode = _read(path)
        digest = hashlib.sha256(content).digest()
        if digest == self._content_digest:
            return False
        self._content_digest = digest
        if mode & stat.S_IROTH:
            logger.warning("--api-key-file %s can be read by every user of this machine (chmod 600)", path)
        try:
            keys = {key.digest: key for key in self._fixed}
            parsed = parse_key_file(content)
            for key in parsed.keys:
                _add(keys, key)
            if not parsed.keys and not (keys and parsed.limits):
                raise ConfigError("it has no keys")
        except ConfigError as error:
            raise ConfigError(f"`api_key_file` {path}: {error}.") from None
        self._keys, self._limits = tuple(keys.values()), parsed.limits
        owners = {key.owner for key in self._keys}
        unknown = sorted(parsed.limits.keys() - owners - {_OTHERS})
        if unknown and ROUTER_OWNER not in owners:  # a router has the keys of others
            logger.warning(
                "--api-key-file %s: limits of %s, of whom there is no key", path, ", ".join(unknown)
            )
        return True


def _parse_line(line: bytes) -> ApiKey | tuple[str, OwnerLimits] | None:
    """The key of one line, or an owner's limits; None for a blank line or a comment. Raises: ConfigError."""
    try:
        text = line.decode().strip()
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8") from None
    if not text or text.startswith("#"):
        return None
    first, *limits = text.split()
    if limits and (first == _OTHERS or _NAME.fullmatch(first)) and not limits[0].startswith("="):
        return first, parse_limits(limits)
    name, equals, key = text.partition("=")
    if not equals:
        raise ConfigError("expected NAME=KEY, or NAME and its limits")
    return _named(name.strip(), key.strip())


def _named(name: str, key: str) -> ApiKey:
    if not _NAME.fullmatch(name):
        raise ConfigError("a name must be 1 to 64 of the characters A-Z, a-z, 0-9, '_', '.' and '-'")
    if _DIGEST.fullmatch(name):
        raise ConfigError(
            "a name must not be 64 hexadecimal digits; such names are the digests of keys without a name"
        )
    if not is_sendable(key):
        raise ConfigError("a key must be printable ASCII without spaces, and not empty")
    return ApiKey(name, hashlib.sha256(key.encode()).digest())


def _unnamed(key: str) -> ApiKey:
    digest = hashlib.sha256(key.encode())
    return ApiKey(digest.hexdigest(), digest.digest())


def _add(keys: dict[bytes, ApiKey], key: ApiKey) -> None:
    """Add ``key`` under its digest. Raises: ConfigError when another owner has it, or there are too many."""
    if keys.setdefault(key.digest, key).owner != key.owner:
        raise ConfigError("two owners have the same key")
    if len(keys) > _MAX_KEYS:
        raise ConfigError(f"more than {_MAX_KEYS} keys")


def _read(path: Path) -> tuple[bytes, int]:
    """The file's content and mode. Raises: ConfigError."""
    try:
        # Opening a pipe would block until something writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"`api_key_file` {path} is not a regular file.")
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"`api_key_file` {path} cannot be read: {error.strerror or error}.") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"`api_key_file` {path} is larger than {_MAX_FILE_BYTES} bytes.")
    return content, mode
