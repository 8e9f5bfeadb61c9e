"""What the driver and the host of a stage send each other over TCP: frames, each with its length first."""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

import msgspec

from backfill.parallel.messages import FromRank

_LENGTH = struct.Struct("<I")
_COMMAND = struct.Struct("<IB")
_STEP = struct.Struct("<q")
_CHUNK = 1 << 16


class Command(IntEnum):
    """To a host, with the bytes that follow it."""

    PLAN = 0  # for the ranks, as the driver has encoded it
    STOP = 1  # the number of a step
    GO_ON = 2  # all ranks of the engine have come to the barrier


class Started(msgspec.Struct, tag=True, frozen=True):
    """Once: the ranks' processes run. Process ids are those of the node."""

    pids: tuple[int, ...]


class AtBarrier(msgspec.Struct, tag=True, frozen=True):
    """Once: all ranks of the stage have come to the barrier."""


class RankReport(msgspec.Struct, tag=True, frozen=True):
    """What a rank has reported."""

    rank: int
    report: FromRank


class StageProgress(msgspec.Struct, tag=True, frozen=True):
    """How far the ranks of the stage are, when that has changed. See ``Progress.part``."""

    part: bytes


FromStage = Started | AtBarrier | RankReport | StageProgress

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromStage] = msgspec.msgpack.Decoder(FromStage)


def encode_command(command: Command, data: bytes = b"") -> bytes:
    return _COMMAND.pack(1 + len(data), command) + data


def encode_stop(step: int) -> bytes:
    return encode_command(Command.STOP, _STEP.pack(step))


def decode_stop(data: bytes) -> int:
    (step,) = _STEP.unpack(data)
    return int(step)


def encode_message(message: FromStage) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def decode_message(frame: bytes) -> FromStage:
    return _decoder.decode(frame)


class FrameReader:
    """Takes frames off a connection without waiting for them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def take(self) -> list[bytes] | None:
        """Frames that are complete by now, perhaps none; None once the other end has closed or is lost."""
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
        found: list[bytes] = []
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                break
            found.append(bytes(received[_LENGTH.size : end]))
            del received[:end]
        return found
