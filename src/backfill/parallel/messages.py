"""What the ranks report to the driver, as MessagePack with its length before it, and its way over a socket.

The driver sends plans (``plan_codec.py``); to ranks that have no memory in common with it also stop requests.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from itertools import repeat
from typing import Any, Generic, TypeVar

import msgspec

from backfill.core.plan import SampledToken, StepOutcome, TokenLogprobs
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo
from backfill.parallel.plan_codec import BadMessage, Sampled

Message = TypeVar("Message")

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 28  # of a plan with all prompts that fit a server, and more
_CHUNK = 1 << 14  # a larger buffer is mapped anew for each call
_encoder = msgspec.msgpack.Encoder()


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Once: the rank's part of the model is loaded."""

    info: ExecutorInfo


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """In place of Loaded. The message is for the user."""

    message: str


class StepDone(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """What a rank knows of a step's outcome.

    Attributes:
        token_ids: sampled ones.
        request_ids: whose they are; None for those of all slices of the plan that sample.
        logprobs: theirs; None without any.
        others: the outcome's other fields; None if they have their defaults.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    request_ids: tuple[RequestId, ...] | None = None
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    others: StepOutcome | None = None


class StepRaised(msgspec.Struct, tag=True, frozen=True):
    """The step failed on the rank."""

    step: int
    message: str


Report = Loaded | LoadFailed | StepDone | StepRaised


class Moved(msgspec.Struct, tag=True, frozen=True):
    """From a rank on another node: how far it is, when that has changed. See ``RankProgress.data``."""

    data: bytes


FromRank = Report | Moved


class RunPlan(msgspec.Struct, tag=True, frozen=True):
    """To a rank on another node: a plan as the driver has encoded it."""

    plan: bytes


class StopStep(msgspec.Struct, tag=True, frozen=True):
    """To a rank on another node."""

    step: int


ToRank = RunPlan | StopStep


def step_done(step: int, outcome: StepOutcome) -> StepDone:
    """The report of an outcome: tokens by column, and names only where the driver cannot know them."""
    others = None if outcome == StepOutcome(outcome.sampled) else replace(outcome, sampled=())
    if not outcome.sampled:
        return StepDone(step, request_ids=(), others=others)
    request_ids, token_ids, logprobs = zip(*outcome.sampled, strict=True)
    return StepDone(
        step,
        token_ids,
        request_ids if outcome.stopped or outcome.failed else None,
        logprobs if any(logprobs) else None,
        others,
    )


def sampled_of(report: StepDone, sampling: tuple[RequestId, ...]) -> Sampled:
    """The tokens of a report. ``sampling``: the requests of all slices of the plan that sample."""
    return Sampled(sampling if report.request_ids is None else report.request_ids, report.token_ids)


def outcome_of(report: StepDone, sampled: Sampled) -> StepOutcome:
    """What ``step_done`` was made of. ``sampled``: ``sampled_of`` the report."""
    logprobs = repeat(None) if report.logprobs is None else report.logprobs
    rows = zip(sampled.request_ids, sampled.token_ids, logprobs, strict=False)
    tokens: tuple[SampledToken, ...] = tuple(map(tuple.__new__, repeat(SampledToken), rows))
    return replace(report.others, sampled=tokens) if report.others is not None else StepOutcome(tokens)


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
        """Messages that are complete by now, perhaps none; None once the other end has closed or is lost.

        Raises: BadMessage; nothing more can be taken then.
        """
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
            num_bytes = _LENGTH.unpack_from(received)[0]
            if num_bytes > MAX_FRAME_BYTES:
                raise BadMessage(f"it announces {num_bytes} bytes, and at most {MAX_FRAME_BYTES} are sent")
            end = _LENGTH.size + num_bytes
            if len(received) < end:
                break
            found.append(self._decoded(received[_LENGTH.size : end]))
            del received[:end]
        return found

    def _decoded(self, data: bytearray) -> Message:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise BadMessage(str(error)) from error
