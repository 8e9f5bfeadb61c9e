"""Options of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from backfill.core.errors import ConfigError
from backfill.core.options import bounded, check_types, internal, secret
from backfill.http.keys import is_sendable
from backfill.router.policy import PolicyName

if TYPE_CHECKING:
    from backfill.http.config import ServerConfig

MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are divided among engines.

    Attributes:
        engines: URL of a Backfill server, such as http://10.0.0.1:8000; repeatable. A path /v1 is left out.
            Others may join later.
        policy: which engine serves an online request. slo: the least predicted TTFT, and the engine that has
            the prompt's prefix in its cache where that costs no objective. The others are baselines.
        engine_api_key: key that the router sends to engines. Beyond loopback clients must send keys too.
        admin_key: key of whoever lists, adds and removes engines. Without one, programs of this machine may,
            where the router listens on loopback, for no further hosts, and has no other key.
        poll_interval: seconds between two looks at an engine's state.
        engine_timeout: seconds for an engine to be reached at the start, and, or for eight
            times ``poll_interval``, until a silent one is dead.
        retry_timeout: seconds that a request waits for an engine where none is up; then HTTP 503.
        join_timeout: seconds for all engines to be reached where they are started with the router; None where
            they run already, which have ``engine_timeout``.
    """

    engines: tuple[str, ...] = ()
    policy: PolicyName = "slo"
    engine_api_key: str | None = secret(None)
    admin_key: str | None = secret(None)
    poll_interval: float = bounded(0.25, above=0)
    engine_timeout: float = bounded(10.0, above=0)
    retry_timeout: float = bounded(30.0, least=0)
    join_timeout: float | None = internal(None)

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        if not self.engines:
            raise ConfigError(
                "is needed: the URLs of the Backfill servers, such as http://10.0.0.1:8000.", field="engines"
            )
        for url in self.engines:
            engine_url(url)
        for field in ("engine_api_key", "admin_key"):
            if not is_sendable(getattr(self, field) or "-"):
                raise ConfigError("must be printable ASCII without spaces.", field=field)

    def check_door(self, server: ServerConfig) -> None:
        """Raises: ConfigError where anybody on the network could use the engines' key."""
        if self.engine_api_key is not None and not (server.asks_for_keys or _is_of_this_machine(server)):
            raise ConfigError(
                f"needs --api-key or --api-key-file where the router listens on {server.host}: without them "
                "anyone would use the engines with it.",
                field="engine_api_key",
            )

    def asks_for_no_admin_key(self, server: ServerConfig) -> bool:
        """Programs of this machine administer the router: they may use all that it guards."""
        guards_nothing = self.engine_api_key is None and not server.asks_for_keys
        return self.admin_key is None and guards_nothing and _is_of_this_machine(server)


def _is_of_this_machine(server: ServerConfig) -> bool:
    """Only programs of this machine reach it: further hosts are named for a proxy, which lets others in."""
    return server.is_on_loopback and not server.allowed_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Replicas of a server.

    Attributes:
        data_parallel_size: servers of the model that are started behind one address, each with an engine of
            its own. They divide the threads on CPU; on CUDA each has a GPU. With ``executor`` ray they are
            actors too, and ``threads`` are of each replica.
        is_replica: it is one of several, which another process has started.
    """

    data_parallel_size: int = bounded(1, least=1, most=MAX_REPLICAS)
    is_replica: bool = internal(False)

    def validate(self) -> None:
        """Raises: ConfigError for a field out of range."""
        check_types(self)


def engine_url(text: str) -> str:
    """The URL of an engine in one spelling. Raises: ConfigError."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if "@" in text:  # nor shown: a password may be in front of it
        raise ConfigError(
            f"must be a URL without a user, got one of {text.rpartition('@')[2][:80]!r}.", field="engines"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"must be the URL of a Backfill server, such as http://10.0.0.1:8000, got {text[:80]!r}.",
            field="engines",
        )
    if parts.path.strip("/") not in ("", "v1") or parts.query or parts.fragment:
        raise ConfigError(f"must be a URL without a path or a query, got {text[:80]!r}.", field="engines")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
