"""Chat templates given by the user."""

from __future__ import annotations

from pathlib import Path

import jinja2

from backfill.core.errors import ConfigError


def read_template(path: Path | None) -> str | None:
    """Read a chat template and check that it parses. Raises: ConfigError."""
    if path is None:
        return None
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`chat_template` {path} cannot be read: {error}.") from error
    check_template(template, f" {path}")
    return template


def check_template(template: str, which: str = "") -> None:
    """Raise ConfigError for Jinja source that does not parse."""
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        if "'generation'" not in str(error):  # a tag that transformers adds
            raise ConfigError(f"`chat_template`{which}, line {error.lineno}: {error.message}") from error
