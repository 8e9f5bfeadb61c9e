"""Options of the HTTP server."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.protocol.response_size import MAX_RESPONSE_TOKENS

# A browser writes a name in Punycode, so nothing but ASCII can match.
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server meets its clients.

    Attributes:
        allowed_hosts: further names that a Host header may have, where it is checked; ``*`` allows any.
        allowed_origins: of web pages that may use the server (CORS), such as ``https://app.example``; ``*``
            allows any.
        max_connections: open at once; None derives it from the limit of open files.
        head_timeout_s: from the first byte of a request's head to its last.
        body_timeout_s: between two chunks of a request's body, which may take ten times as long in all, or
            longer if it comes at 16 KiB/s.
        write_timeout_s: how long a client may take nothing of its answer.
        max_queued_requests: online choices accepted beyond those that can run at once; more get 429.
        max_queued_offline_requests: offline choices (flex) accepted at once; more get 429.
        max_body_bytes: larger JSON bodies get 413.
        max_inflight_body_bytes: of all JSON bodies that are being read or prepared; beyond, 503.
        max_response_tokens: choices x max_tokens x (1 + logprobs) of one request.
        drain_timeout_s: how long online requests may go on after a signal to stop.
        api_keys: ``NAME=KEY`` or ``KEY``; when any are given here or in the file, requests must carry one.
        api_key_file: lines ``NAME=KEY``; read again when it changes.
        sheds_hopeless: online requests that would miss their TTFT objective by far get 429.
        is_strict: requests with fields that the server does not know, or with an empty ``slo``, get 400
            rather than a warning. Known fields that it ignores (``metadata``) and keys inside messages get
            neither.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_connections: int | None = None
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    max_queued_requests: int = 1024
    max_queued_offline_requests: int = 1024
    max_body_bytes: int = 4 << 20
    max_inflight_body_bytes: int = 256 << 20
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    drain_timeout_s: float = 30.0
    keep_alive_interval_s: float = 0.0
    vllm_metrics: bool = False
    is_strict: bool = False
    sheds_hopeless: bool = False
    log_level: str = "INFO"

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def known_origins(self) -> tuple[str, ...]:
        """``allowed_origins`` as browsers write them."""
        return tuple(map(_as_browsers_write, self.allowed_origins))

    def validate(self) -> None:
        """Raise ConfigError naming the first option out of range."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "--allowed-origins must be * or scheme://host[:port] without a path, such as "
                    f"https://app.example, got {origin!r}."
                )
        for option, number, least in (
            ("--max-queued-requests", self.max_queued_requests, 0),
            ("--max-queued-offline-requests", self.max_queued_offline_requests, 0),
            ("--max-body-bytes", self.max_body_bytes, 1),
            ("--max-inflight-body-bytes", self.max_inflight_body_bytes, self.max_body_bytes),
            ("--max-response-tokens", self.max_response_tokens, 1),
            ("--max-connections", 1 if self.max_connections is None else self.max_connections, 1),
        ):
            if number < least:
                raise ConfigError(f"{option} must be at least {least}, got {number}.")
        for option, seconds in (
            ("--shutdown-timeout", self.drain_timeout_s),
            ("--sse-keep-alive-interval", self.keep_alive_interval_s),
        ):
            if not seconds >= 0:
                raise ConfigError(f"{option} must be at least 0 seconds, got {seconds:g}.")
        for option, seconds in (
            ("--head-timeout", self.head_timeout_s),
            ("--body-timeout", self.body_timeout_s),
            ("--write-timeout", self.write_timeout_s),
        ):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{option} must be above 0 seconds, got {seconds:g}.")


def _as_browsers_write(origin: str) -> str:
    """In lower case, without the scheme's default port."""
    scheme, separator, host = origin.lower().partition("://")
    return scheme + separator + host.removesuffix(_DEFAULT_PORTS.get(scheme, ""))
