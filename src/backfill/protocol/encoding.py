"""JSON bodies in chunks. Encoding or copying a long response at once would stall the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()
_PLACEHOLDER = b"\0"  # no JSON text contains it: encoders escape it
_CHUNK_BYTES = 256 << 10


class EncodedList:
    """A JSON array whose entries are encoded when they are added."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def extend(self, entries: Sequence[object]) -> None:
        """Add entries, at least one."""
        encoded = _encoder.encode(entries)[1:-1]
        self.parts.append(b"," + encoded if self.parts else encoded)


class EncodedBody:
    """A JSON object that may contain ``EncodedList`` anywhere. The lists may not change afterwards."""

    def __init__(self, body: dict[str, Any]) -> None:
        lists: list[EncodedList] = []

        def placeholder(value: object) -> msgspec.Raw:
            if not isinstance(value, EncodedList):
                raise TypeError(f"{type(value).__name__} is not JSON")
            lists.append(value)
            return msgspec.Raw(b"[" + _PLACEHOLDER + b"]")

        first, *others = msgspec.json.encode(body, enc_hook=placeholder).split(_PLACEHOLDER)
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
            if num_bytes >= _CHUNK_BYTES:
                yield b"".join(group)
                group, num_bytes = [], 0
        if group:
            yield b"".join(group)
