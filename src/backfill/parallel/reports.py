"""Reports of ranks over sockets, each with its length before it."""

from __future__ import annotations

import socket
import struct

import msgspec

from backfill.parallel.messages import FromRank

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 14  # a larger buffer is mapped anew for each call
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def send_report(link: socket.socket, report: FromRank) -> None:
    """Raises: OSError if the driver has ended."""
    data = _encoder.encode(report)
    link.sendall(_LENGTH.pack(len(data)) + data)


class ReportReader:
    """Receives the reports of one rank, from a socket that does not block."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._received = bytearray()

    def take(self) -> list[FromRank] | None:
        """The reports that are complete by now, perhaps none; None once the rank has ended."""
        try:
            data = self._link.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        received = self._received
        received += data
        found: list[FromRank] = []
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                break
            found.append(_decoder.decode(received[_LENGTH.size : end]))
            del received[:end]
        return found
