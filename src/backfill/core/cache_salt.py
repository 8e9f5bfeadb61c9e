"""The salt of a request: only requests with the same salt share cached prefixes."""

from __future__ import annotations

from backfill.core.errors import RequestError

MAX_CACHE_SALT_CHARS = 256


def check_cache_salt(salt: object) -> None:
    """Raise RequestError, without the salt, unless it is text of 1 to ``MAX_CACHE_SALT_CHARS`` characters."""
    if not isinstance(salt, str):
        problem = f"be a string, got a value of type {type(salt).__name__}"
    elif not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        problem = f"have 1 to {MAX_CACHE_SALT_CHARS} characters, got {len(salt)}"
    elif any("\ud800" <= char <= "\udfff" for char in salt):
        problem = "be valid Unicode, got half of a surrogate pair"
    else:
        return
    raise RequestError(f"cache_salt must {problem}.", param="cache_salt")
