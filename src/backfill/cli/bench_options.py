"""What the commands that load a server have in common."""

from __future__ import annotations

import os
import sys

from backfill.core.errors import ConfigError


def server_url(text: str) -> str:
    """Scheme, host and port of ``--base-url``, which may end in ``/v1``. Raises: ConfigError."""
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must begin with http:// or https://, got {text!r}.")
    return text.rstrip("/").removesuffix("/v1")


def authorization() -> dict[str, str]:
    """The header that carries OPENAI_API_KEY, where that is set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def check_at_least(*checks: tuple[str, float | None, float]) -> None:
    """Raises: ConfigError for the first option whose value is below its least one."""
    for option, value, least in checks:
        if value is not None and not value >= least:
            raise ConfigError(f"{option} must be at least {least:g}, got {value:g}.")


def note(text: str) -> None:
    """Tell the user something beside the result."""
    print(f"backfill: {text}", file=sys.stderr)
