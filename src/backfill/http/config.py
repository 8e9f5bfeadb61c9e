"""Options of the HTTP server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import ConfigError
from backfill.core.options import Bounds, bounded, internal, secret
from backfill.protocol.options import MAX_RESPONSE_TOKENS, RequestOptions

# A browser writes a name in Punycode, so nothing but ASCII can match.
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", re.ASCII | re.IGNORECASE)
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+=[!-~]([ -~]*[!-~])?")
_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_URL = re.compile(r"https?://[^/?#\s]+\S*", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(RequestOptions):
    """How the server meets its clients.

    Attributes:
        host: address to listen on.
        port: port to listen on.
        uds: Unix domain socket to listen on, in place of host and port. Whom it lets in is the umask's.
        ssl_certfile: PEM file of the certificate and its chain; the server then speaks HTTPS.
        ssl_keyfile: PEM file of its key, where the certificate's file does not hold it.
        root_path: path under which a reverse proxy offers this server, and which it strips, such as /llm.
        shares_port: another socket of this user reserves the port.
        api_key: key clients must send, as KEY or NAME=KEY; repeatable. Files and batches belong to NAME,
            which may have several keys, or to the KEY itself. Without a name, a KEY with an '=' within is
            written =KEY.
        api_key_file: file with lines NAME=KEY, and NAME LIMIT=VALUE; read again when it changes.
        allowed_hosts: further Host that requests may name, where it is checked: on loopback without an API
            key. Repeatable; * allows any.
        offline_header: NAME=VALUE of a header by which a gateway marks requests as offline; they are, unless
            their body names a service_tier. Repeatable.
        allowed_origins: origin of web pages that may use the server (CORS), such as https://app.example.
            Repeatable; * allows any.
        max_connections: connections open at once. Default: what open files allow, at most 8192.
        head_timeout: seconds that a request's head may take; then HTTP 408.
        body_timeout: seconds that a request's body may pause, ten times as many for all of it; then HTTP 408.
        write_timeout: seconds that a client may take nothing of its response; then the request is aborted.
        max_queued_requests: online requests accepted beyond ``max_num_seqs``; more get HTTP 429.
        max_queued_offline_requests: requests of service_tier flex accepted at once; more get HTTP 429.
        max_body_bytes: larger JSON bodies get HTTP 413, and a batch with a longer line fails. Uploads have
            limits of their own.
        max_inflight_body_bytes: bytes of all JSON bodies being read or prepared; beyond, HTTP 503.
        max_response_tokens: choices x max_tokens x (1 + logprobs) of one request; more get HTTP 400.
        shutdown_timeout: seconds that running requests have to end after a signal.
        sse_keep_alive_interval: seconds between comments on a silent stream; 0 sends none.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a trace of each request, such as
            http://localhost:4318/v1/traces. Needs the extra otel.
        vllm_metrics: also expose the core metrics under vllm: names; the load is that of online requests
            alone.
        shed_hopeless: refuse online requests whose first token would come more than twice as late as their
            objective, with HTTP 429.
    """

    host: str = "127.0.0.1"
    port: int = bounded(8000, least=0, most=65535)
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""
    shares_port: bool = internal(False)
    api_key: tuple[str, ...] = secret(())
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    offline_header: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_connections: int | None = bounded(None, least=1)
    head_timeout: float = bounded(10.0, above=0)
    body_timeout: float = bounded(30.0, above=0)
    write_timeout: float = bounded(30.0, above=0)
    max_queued_requests: int = bounded(1024, least=0)
    max_queued_offline_requests: int = bounded(1024, least=0)
    max_body_bytes: int = bounded(4 << 20, least=1)
    max_inflight_body_bytes: int = 256 << 20
    max_response_tokens: int = bounded(MAX_RESPONSE_TOKENS, least=1)
    shutdown_timeout: float = 30.0
    sse_keep_alive_interval: float = 0.0
    otlp_traces_endpoint: str | None = None
    vllm_metrics: bool = False
    shed_hopeless: bool = False

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None

    @property
    def is_on_loopback(self) -> bool:
        """Only programs of this machine can connect."""
        if self.uds is not None:
            return True
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def offline_headers(self) -> frozenset[tuple[bytes, bytes]]:
        """``offline_header`` as a request has them: names in lower case, and values."""
        parts = (each.partition("=") for each in self.offline_header)
        return frozenset((name.lower().encode(), value.encode()) for name, _, value in parts)

    @property
    def certificate(self) -> tuple[Path, Path | None] | None:
        """Files of the certificate and of its key; None for plain HTTP."""
        return None if self.ssl_certfile is None else (self.ssl_certfile, self.ssl_keyfile)

    @property
    def known_origins(self) -> tuple[str, ...]:
        """``allowed_origins`` as browsers write them."""
        return tuple(map(_as_browsers_write, self.allowed_origins))

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        RequestOptions.validate(self)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "must be * or scheme://host[:port] without a path, such as https://app.example, "
                    f"got {origin!r}.",
                    field="allowed_origins",
                )
        for header in self.offline_header:
            if not _HEADER.fullmatch(header):
                raise ConfigError(
                    f"must be NAME=VALUE, such as x-gateway-inference-objective=batch, got {header!r}.",
                    field="offline_header",
                )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("needs the certificate, `ssl_certfile`.", field="ssl_keyfile")
        if self.root_path and not _PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"must begin and not end with /, such as /llm, got {self.root_path!r}.", field="root_path"
            )
        collector = self.otlp_traces_endpoint
        if collector is not None and not _URL.fullmatch(collector):
            raise ConfigError(
                f"must be a URL such as http://localhost:4318/v1/traces, got {collector!r}.",
                field="otlp_traces_endpoint",
            )
        Bounds(least=self.max_body_bytes).check("max_inflight_body_bytes", self.max_inflight_body_bytes)
        for field in ("shutdown_timeout", "sse_keep_alive_interval"):
            if not (seconds := getattr(self, field)) >= 0:
                raise ConfigError(f"must be at least 0 seconds, got {seconds:g}.", field=field)


def _as_browsers_write(origin: str) -> str:
    """In lower case, without the scheme's default port."""
    scheme, separator, host = origin.lower().partition("://")
    return scheme + separator + host.removesuffix(_DEFAULT_PORTS.get(scheme, ""))
