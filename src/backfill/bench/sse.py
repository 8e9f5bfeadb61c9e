"""Server-sent events, read from a stream of bytes."""

from __future__ import annotations


class SseDecoder:
    """Collects bytes until events are complete. A read may hold several events or a part of one.

    Source: the WHATWG HTML standard, section 9.2.6. Lines end in LF or CRLF, an empty line ends an event,
    several ``data`` lines are joined by LF, and comments and other fields are skipped. A lone CR does not end
    a line here; no server sends it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that these bytes complete."""
        # Bytes are split, not text, since a read may end within a UTF-8 character.
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if not stripped:
                events += self._end_event()
            elif stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))
        return events

    def finish(self) -> list[bytes]:
        """The events that the end of the stream completes: some servers leave out the last empty line."""
        return self.feed(b"\n\n")

    def _end_event(self) -> list[bytes]:
        if not self._data:
            return []
        event = b"\n".join(self._data)
        self._data.clear()
        return [event]
