"""Limits on the number of values in a JSON body, as parsing one takes up to 1 KB and 3 us."""

from __future__ import annotations

import re
from collections.abc import Iterator

from backfill.core.errors import RequestError

MAX_CONTAINERS = 16_384
MAX_KEYS = 65_536
MAX_ITEMS = 524_288

# Name, the marks that are counted, and how many of them are allowed outside strings.
_LIMITS = (
    ("objects and arrays", (b"{", b"["), MAX_CONTAINERS),
    ("keys", (b":",), MAX_KEYS),
    ("items", (b",",), MAX_ITEMS),
)
# A string, up to the end of the body if it is not closed; possessive, so that no input is read twice.
_STRING = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_STRINGS = re.compile(_STRING, re.DOTALL)
# In blocks, as one call of ``re`` keeps all other threads waiting.
_BLOCKS = re.compile(rb'(?:[^"]++|' + _STRING + rb"){1,4096}+", re.DOTALL)


def check_shape(raw: bytes) -> None:
    """Raise RequestError for too many objects and arrays, keys, or items. The body may be invalid JSON."""
    if all(_num_marks(raw, marks) <= most for _, marks, most in _LIMITS):  # strings included
        return
    counts = dict.fromkeys(_LIMITS, 0)
    for block in _without_strings(raw):
        for limit in _LIMITS:
            name, marks, most = limit
            counts[limit] += _num_marks(block, marks)
            if counts[limit] > most:
                raise RequestError(f"The body may hold at most {most} {name}.")


def _without_strings(raw: bytes) -> Iterator[bytes]:
    for block in _BLOCKS.finditer(raw):
        yield _STRINGS.sub(b"", block[0])


def _num_marks(raw: bytes, marks: tuple[bytes, ...]) -> int:
    return sum(map(raw.count, marks))
