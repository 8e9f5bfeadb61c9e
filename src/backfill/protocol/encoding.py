"""JSON bodies in chunks: to encode or copy a long answer at once would stall the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()
_PLACE = b"\0"  # in no JSON text: encoders escape it
_PIECE_BYTES = 256 << 10


class EncodedList:
    """A JSON array whose entries are encoded as they come."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def extend(self, entries: Sequence[object]) -> None:
        """Add entries, at least one."""
        encoded = _encoder.encode(entries)[1:-1]
        self.parts.append(b"," + encoded if self.parts else encoded)


class EncodedBody:
    """A JSON object that may hold ``EncodedList`` anywhere; those may not change any more.

    Attributes:
        num_bytes: of the whole text.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        lists: list[EncodedList] = []

        def hold_place(value: object) -> msgspec.Raw:
            if not isinstance(value, EncodedList):
                raise TypeError(f"{type(value).__name__} is no JSON")
            lists.append(value)
            return msgspec.Raw(b"[" + _PLACE + b"]")

        first, *others = msgspec.json.encode(body, enc_hook=hold_place).split(_PLACE)
        self._parts = [first]
        for encoded, following in zip(lists, others, strict=True):
            self._parts += encoded.parts
            self._parts.append(following)
        self.num_bytes = sum(map(len, self._parts))

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def chunks(self) -> Iterator[bytes]:
        """The text in chunks of about 256 KiB."""
        group: list[bytes] = []
        num_bytes = 0
        for part in self._parts:
            group.append(part)
            num_bytes += len(part)
            if num_bytes >= _PIECE_BYTES:
                yield b"".join(group)
                group, num_bytes = [], 0
        if group:
            yield b"".join(group)
