"""The listening socket. Not in ``server``, whose imports take long."""

from __future__ import annotations

import socket

from backfill.core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before anything slow, so that a port in use fails at once. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # A long backlog: load generators open all connections at once.
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error
    return listener
