"""Options of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from backfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server meets its clients.

    Attributes:
        max_queued_requests: choices accepted beyond those that can run at once; more get 429.
        max_body_bytes: larger bodies get 413.
        drain_timeout_s: how long online requests may go on after a signal to stop.
        api_keys: when any are given, requests must carry one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queued_requests: int = 1024
    max_body_bytes: int = 32 << 20
    drain_timeout_s: float = 30.0
    keep_alive_interval_s: float = 0.0
    vllm_metrics: bool = False
    log_level: str = "INFO"

    def validate(self) -> None:
        """Raise ConfigError naming the first option out of range."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        if self.max_queued_requests < 0:
            raise ConfigError(f"--max-queued-requests must be at least 0, got {self.max_queued_requests}.")
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}.")
        for option, seconds in (
            ("--shutdown-timeout", self.drain_timeout_s),
            ("--sse-keep-alive-interval", self.keep_alive_interval_s),
        ):
            if not seconds >= 0:
                raise ConfigError(f"{option} must be at least 0 seconds, got {seconds:g}.")
