from __future__ import annotations

import pytest

from backfill.core.cache_salt import MAX_CACHE_SALT_CHARS, check_cache_salt
from backfill.core.errors import RequestError


@pytest.mark.parametrize("salt", ["a", " ", "\0", "é" * MAX_CACHE_SALT_CHARS, "\U0001f9c2"])
def test_any_short_text_is_a_salt(salt: str) -> None:
    check_cache_salt(salt)


@pytest.mark.parametrize(
    ("salt", "problem"),
    [
        ("", "cache_salt must have 1 to 256 characters, got 0."),
        ("secret" * 50, "cache_salt must have 1 to 256 characters, got 300."),
        ("secret\ud800", "cache_salt must be valid Unicode, got half of a surrogate pair."),
        (b"secret", "cache_salt must be a string, got a value of type bytes."),
        (5, "cache_salt must be a string, got a value of type int."),
        (None, "cache_salt must be a string, got a value of type NoneType."),
    ],
)
def test_anything_else_is_refused_without_being_repeated(salt: object, problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_cache_salt(salt)
    assert (str(refused.value), refused.value.param) == (problem, "cache_salt")
