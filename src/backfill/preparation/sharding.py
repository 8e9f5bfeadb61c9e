"""Splits a file's lines among several runs, each of which computes the same split."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from backfill.blending.requests import PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.blending.split import split_requests
from backfill.core.errors import RequestError
from backfill.preparation.line_file import mark
from backfill.preparation.line_pool import MAX_LINES
from backfill.preparation.lines import InputLine, parse_line, read_lines
from backfill.preparation.messages import SplitLines
from backfill.protocol.generation import GenerationBody, GenerationEndpoint

_GROUP_LINES = 64
_UNKNOWN_OUTPUT_TOKENS = 256  # of a line that names no limit; the engine's limit may differ between runs

FirstPrompt = Callable[[GenerationEndpoint, bytes], tuple[list[int], GenerationBody]]


class FileSplit:
    """Reads a whole file, and says which of its lines are not one shard's.

    The split depends on the file, the tokenizer and the model's dimensions, and not on the engine: runs on
    machines with more or less memory agree. A line whose prompt cannot be tokenized is in some shard too.

    Args:
        first_prompt: tokenizes a body; raises RequestError.
    """

    def __init__(self, wanted: SplitLines, first_prompt: FirstPrompt, resources: ResourceModel) -> None:
        self._wanted = wanted
        self._first_prompt = first_prompt
        self._resources = resources
        self._requests: list[PoolRequest] = []
        self._file = Path(wanted.path).open("rb")  # until ``close``  # noqa: SIM115
        self._lines = read_lines(self._file, wanted.max_line_bytes)

    def advance(self) -> bool:
        """Read the next lines.

        Returns: True at the end of the file. Raises: BadLine, OSError, RequestError for too many lines.
        """
        for _ in range(_GROUP_LINES):
            entry = next(self._lines, None)
            if entry is None:
                return True
            number, data = entry
            line = parse_line(number, data, self._wanted.max_line_bytes)
            self._requests.append(self._request_of(line))
            if len(self._requests) > MAX_LINES:
                raise RequestError(
                    f"A file that is split into shards may have {MAX_LINES} lines.", param="shards"
                )
        return False

    def others(self) -> bytes:
        """A bit for each line of the other shards: that of line i is bit i % 8 of byte i // 8."""
        shards = split_requests(self._requests, self._wanted.num_shards, self._resources)
        bits = bytearray()
        for shard, numbers in enumerate(shards):
            for number in numbers if shard != self._wanted.shard else ():
                mark(bits, number)
        return bytes(bits)

    def close(self) -> None:
        self._file.close()

    def _request_of(self, line: InputLine) -> PoolRequest:
        prompt, max_tokens, is_known = array("I", [0]), 1, True
        # It fails when it runs, in the shard that has it. A token id may be none that fits.
        with suppress(RequestError, OverflowError):
            token_ids, body = self._first_prompt(cast(GenerationEndpoint, line.url), line.body)
            prompt = array("I", token_ids or [0])
            asked = body.requested_max_tokens
            max_tokens = _UNKNOWN_OUTPUT_TOKENS if asked is None else max(1, asked)
            runs_on = bool(body.ignore_eos) and not body.stop_strings and not body.stop_token_ids
            is_known = asked is not None and (runs_on or body.min_tokens == max_tokens)
        return PoolRequest(
            request_id=line.number,
            prompt_token_ids=prompt,
            max_output_tokens=max_tokens,
            known_output_tokens=max_tokens if is_known else None,
        )
