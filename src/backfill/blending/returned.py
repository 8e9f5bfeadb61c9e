"""Requests that were put back, in that order."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from backfill.blending.run import Entry
from backfill.blending.tree import shared_prefix_tokens


class Returned:
    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._prompts: list[bytes] = []  # sorted

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        self._entries[entry.request_id] = entry
        insort(self._prompts, entry.prompt)

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.request_id]
        del self._prompts[bisect_left(self._prompts, entry.prompt)]

    def first(
        self,
        group: str | None,
        most_output_tokens: float = math.inf,
        *,
        is_dense: bool | None = None,
    ) -> Entry | None:
        """The one that was put back first, of a group or of all, and of one kind or of both.

        Memory-bound ones that are expected to generate more tokens are passed over.
        """
        for entry in self:
            fits = entry.is_dense or entry.expected.output_tokens <= most_output_tokens
            if fits and group in {None, entry.batch.group} and is_dense in {None, entry.is_dense}:
                return entry
        return None

    def longest_shared(self, prompt: bytes) -> int:
        """Leading tokens of the prompt that any of these prompts begins with too."""
        index = bisect_left(self._prompts, prompt)
        neighbours = self._prompts[max(index - 1, 0) : index + 1]
        return max((shared_prefix_tokens(prompt, other) for other in neighbours), default=0)
