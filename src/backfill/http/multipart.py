"""A parser of ``multipart/form-data`` bodies as they arrive: small fields whole, files in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from backfill.core.errors import RequestError

MAX_FIELD_BYTES = 4096
MAX_PARTS = 32
# Everything except the data of files: preamble, boundaries, heads of parts, fields, epilogue.
MAX_OVERHEAD_BYTES = 64 << 10
# Each chunk is written in another thread; with chunks of this size the switch costs little.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FormField:
    """A part without a filename."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileStart:
    """The head of a part with a filename. The client chose ``filename``: it is never used as a path."""

    name: str
    filename: str


FormEvent = FormField | FileStart | bytearray


async def read_form(body: AsyncIterable[bytes], content_type: str) -> AsyncGenerator[FormEvent, None]:
    """The parts of the form, in order. A ``FileStart`` is followed by the file's bytes in chunks of at most
    1 MiB plus one chunk of ``body``; an empty file has no chunks.

    Raises: RequestError for a body that is incomplete or malformed.
    """
    parser = _FormParser(_boundary(content_type))
    async for chunk in body:
        for event in parser.push(chunk):
            yield event
    if not parser.is_complete:
        raise RequestError("The multipart body ends before its final boundary.")


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError(
            f"The Content-Type must be multipart/form-data with a boundary, got {content_type[:80]!r}."
        )
    return boundary


class _FormParser:
    """Turns the parser's callbacks into events."""

    def __init__(self, boundary: bytes) -> None:
        self.is_complete = False
        self._num_overhead_bytes = 0
        self._events: list[FormEvent] = []
        self._num_parts = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._data = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_begin": self._on_header_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise RequestError("The multipart boundary is too long.") from error

    def push(self, chunk: bytes) -> list[FormEvent]:
        """The events that ``chunk`` completes."""
        self._events = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise RequestError("The multipart body is malformed.") from error
        self._num_overhead_bytes += len(chunk)
        if self._num_overhead_bytes > MAX_OVERHEAD_BYTES:
            message = f"The multipart body has more than {MAX_OVERHEAD_BYTES} bytes besides its file."
            raise RequestError(message)
        if self._is_file and len(self._data) >= CHUNK_BYTES:
            self._flush()
        return self._events

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError(f"The multipart body has more than {MAX_PARTS} parts.")
        self._disposition = b""

    def _on_header_begin(self) -> None:
        self._header_name.clear()
        self._header_value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise RequestError("A part of the multipart body has no name.")
        self._name = options[b"name"].decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None
        if filename is not None:
            self._events.append(FileStart(self._name, filename.decode("utf-8", "replace")))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]
        if self._is_file:
            self._num_overhead_bytes -= end - start
        elif len(self._data) > MAX_FIELD_BYTES:
            raise RequestError(
                f"The form field {self._name!r} is over {MAX_FIELD_BYTES} bytes.", param=self._name
            )

    def _on_part_end(self) -> None:
        if self._is_file:
            self._flush()
            self._is_file = False
            return
        self._events.append(FormField(self._name, self._data.decode("utf-8", "replace")))
        self._data.clear()

    def _on_end(self) -> None:
        self.is_complete = True

    def _flush(self) -> None:
        if self._data:
            # The buffer itself is passed on, not a copy; the next chunk gets a new one.
            self._events.append(self._data)
            self._data = bytearray()
