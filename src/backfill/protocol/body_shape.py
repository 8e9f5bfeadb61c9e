"""How many objects and arrays a JSON body holds, counted before a parser spends up to 1 KB on each."""

from __future__ import annotations

import re

from backfill.core.errors import RequestError

MAX_CONTAINERS = 16_384

# Strings, to the end of the body where one is not closed; possessive, so that no input is read twice.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def check_num_containers(raw: bytes) -> None:
    """Raise RequestError for a body of more than 16,384 objects and arrays; it need not be valid JSON."""
    if _num_brackets(raw) > MAX_CONTAINERS and _num_brackets(_STRINGS.sub(b"", raw)) > MAX_CONTAINERS:
        raise RequestError(f"The body may hold at most {MAX_CONTAINERS} objects and arrays.")


def _num_brackets(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[")
