"""Errors of the library's callers: also a ValueError, and with options named as keywords."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backfill.core.errors import BackfillError, ConfigError, RequestError
from backfill.core.options import spell


class InvalidRequest(RequestError, ValueError):
    """A prompt or a sampling parameter that can never be served; ``param`` names it."""


class InvalidOption(ConfigError, ValueError):
    """An option of the engine is out of range; the message names it."""


@contextmanager
def in_library_terms(where: str = "") -> Iterator[None]:
    """Errors of the layers below become this one's, and options are named as keywords.

    Args:
        where: goes before what is wrong with a request.
    """
    try:
        yield
    except RequestError as error:
        raise InvalidRequest(where + str(error), param=error.param, code=error.code) from None
    except ConfigError as error:
        raise InvalidOption(with_keywords(str(error))) from None
    except BackfillError as error:
        error.args = (with_keywords(str(error)),)
        raise


def with_keywords(message: str) -> str:
    """A message of the layers below, with options named as keywords."""
    return spell(message, lambda name: name)
