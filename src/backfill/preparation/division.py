"""Divides the lines of a file into parts, for several servers to run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from backfill.blending.requests import TOKEN_BYTES, OrderName, PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.blending.split import split_requests
from backfill.preparation.line_file import mark
from backfill.preparation.lines import InputLine

MAX_PLANNED_BYTES = 256 << 20
"""Of a file's prompts. One with more is divided in the order of its lines."""

# Servers take part after part. Small ones end together, and each claim costs a reading of the file.
_NUM_PARTS = 32
_LEAST_LINES, _MOST_LINES = 4, 512
_NUM_BLOCKS = 16  # of neighbours in the file that each part has at least, where it is too large to be planned
_UNKNOWN_OUTPUT_TOKENS = 256  # of a line that names no limit

Part = TypeVar("Part")


class _Lengths(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


_lengths_decoder = msgspec.json.Decoder(_Lengths)


class Division:
    """Parts of equal expected work that cut few shared prefixes (BlendServe, section 6.1).

    A prompt's text, four bytes at a time, stands for its tokens: prompts that begin alike have equal numbers
    at their beginning, and a number is about a token. So the tree is built without a tokenizer.

    Args:
        order: of lines; parts follow the file with ``fcfs``.
    """

    def __init__(self, order: OrderName, resources: ResourceModel) -> None:
        self._resources = resources
        self._numbers: list[int] = []
        self._is_fcfs = order == "fcfs"
        self._num_bytes = MAX_PLANNED_BYTES + 1 if self._is_fcfs else 0
        self._requests: list[PoolRequest] = []

    def add(self, line: InputLine) -> None:
        self._numbers.append(line.number)
        if self._num_bytes <= MAX_PLANNED_BYTES:
            self._requests.append(pool_request(line))
            self._num_bytes += len(line.body)
        else:
            self._requests.clear()

    def parts(self) -> list[bytes]:
        """Small parts, as ``parts_of``; none where there are too few lines to divide.

        A server takes some that follow each other. But with ``fcfs`` these are far apart in the order, so
        that all it has at a time is alike in all servers and until the end.
        """
        num_parts = num_parts_of(len(self._numbers))
        if num_parts < 2:
            return []
        parts = self.parts_of(num_parts)
        return [part for part in (parts if self._is_fcfs else spread(parts)) if any(part)]

    def parts_of(self, num_parts: int) -> list[bytes]:
        """So many parts. Each has a bit for each line of the file, as in ``LineSelection``."""
        if self._requests:
            divided = split_requests(self._requests, num_parts, self._resources)
        else:
            num_lines = len(self._numbers)
            block = max(1, num_lines // (num_parts * _NUM_BLOCKS))
            divided = [[] for _ in range(num_parts)]
            for index, number in enumerate(self._numbers):
                part = index * num_parts // num_lines if self._is_fcfs else index // block % num_parts
                divided[part].append(number)
        return [self._bits(part) for part in divided]

    def _bits(self, numbers: Iterable[int]) -> bytes:
        bits = bytearray(max(self._numbers, default=0) // 8 + 1)  # of all lines: those not set are others'
        for number in numbers:
            mark(bits, number)
        return bytes(bits)


def spread(parts: Sequence[Part]) -> list[Part]:
    """The parts in an order in which any that follow each other are far apart: by their reversed bits."""
    num_bits = len(parts).bit_length()
    return [parts[i] for i in sorted(range(len(parts)), key=lambda i: f"{i:0{num_bits}b}"[::-1])]


def num_parts_of(num_lines: int) -> int:
    """Of a file's lines."""
    return math.ceil(num_lines / min(max(math.ceil(num_lines / _NUM_PARTS), _LEAST_LINES), _MOST_LINES))


def pool_request(line: InputLine, complete_by_s: float | None = None) -> PoolRequest:
    """The line for a pool, by its text: see ``Division``."""
    try:
        lengths = _lengths_decoder.decode(line.body)
    except (msgspec.MsgspecError, RecursionError):
        lengths = _Lengths()
    prompt = bytes(lengths.messages) or bytes(lengths.prompt) or b"    "
    asked = lengths.max_completion_tokens or lengths.max_tokens or _UNKNOWN_OUTPUT_TOKENS
    return PoolRequest(
        request_id=line.number,
        prompt_token_ids=prompt + b" " * (-len(prompt) % TOKEN_BYTES),
        max_output_tokens=max(1, asked),
        complete_by_s=complete_by_s,
        num_choices=max(1, lengths.n or 1),
    )
