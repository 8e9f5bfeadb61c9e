"""Messages over a socket, as MessagePack with their length before them."""

from __future__ import annotations

import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 14  # a larger buffer is mapped anew for each call
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class FrameReader(Generic[Message]):
    """Takes messages off a connection without waiting for them.

    Args:
        kind: type of the messages; a union is not a ``type``.
    """

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection = connection
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._received = bytearray()

    def take(self) -> list[Message] | None:
        """Messages that are complete by now, perhaps none; None once the other end has closed or is lost."""
        try:
            data = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        received = self._received
        received += data
        found: list[Message] = []
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                break
            found.append(self._decoder.decode(received[_LENGTH.size : end]))
            del received[:end]
        return found
