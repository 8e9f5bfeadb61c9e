"""Checks an input file before its lines run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

from backfill.core.errors import RequestError
from backfill.preparation.division import Division
from backfill.preparation.lines import BadLine, InputLine, LineError, check_target, parse_line, read_lines
from backfill.preparation.messages import InputLimits, InputReport
from backfill.protocol.body_check import BodyCheck, has_warning, warning_of
from backfill.protocol.generation import GenerationEndpoint, parse_generation
from backfill.protocol.responses import shortened

MAX_REPORTED_ERRORS = 100

_DIGEST_BYTES = 16
_GROUP_BYTES = 1 << 20  # small lines of this size take about 60 ms


class InputCheck:
    """Checks a file in groups of lines, so that a caller can do other things between groups.

    It checks what needs no tokens. A prompt that is too long is found when its line runs. Memory is bounded,
    except for 16 bytes and a set entry for each ``custom_id``, and for what ``division`` needs.

    Args:
        division: of the lines, for several servers.
    """

    def __init__(
        self, path: Path, limits: InputLimits, body_check: BodyCheck, division: Division | None = None
    ) -> None:
        # A large buffer makes few reads. Each read releases the interpreter's lock too briefly for another
        # thread to take it, and threads that wait for the lock start to wait again.
        self._file = path.open("rb", buffering=_GROUP_BYTES)
        self._lines = read_lines(self._file, limits.max_line_bytes)
        self._limits = limits
        self._body_check = body_check
        self._division = division
        self._model_names = frozenset(limits.model_names)
        self._model_hint = limits.model_hint or f"This server has: {', '.join(sorted(limits.model_names))}."
        self._seen: set[bytes] = set()
        self._total = 0
        self._model: str | None = None
        self._errors: list[LineError] = []
        self._num_warned = 0
        self._first_warning = ""

    @property
    def report(self) -> InputReport:
        warning = None
        if self._num_warned:
            lines = "1 line has" if self._num_warned == 1 else f"{self._num_warned} lines have"
            warning = f"{lines} fields with no effect, first in {self._first_warning}."
        parts: list[bytes] = []
        if self._division is not None and self._limits.divides and not self._errors:
            parts = self._division.parts()
        return InputReport(self._total, self._model, self._errors, warning, parts)

    def advance(self, num_bytes: int = _GROUP_BYTES) -> bool:
        """Check the next lines, of ``num_bytes`` or a little more.

        Returns: True at the end of the file, or if no more errors will be reported.
        """
        num_read = 0
        while num_read < num_bytes:
            entry = next(self._lines, None)
            if entry is None:
                if self._total == 0:
                    self._errors.append(LineError("empty_file", "The input file has no lines."))
                return self._end()
            self._total += 1
            if self._total > self._limits.max_lines:
                message = f"The input file has more than {self._limits.max_lines} lines."
                self._errors = [LineError("too_many_tasks", message)]
                return self._end()
            number, data = entry
            num_read += len(data)
            self._errors += self._errors_of(number, data)
            if len(self._errors) >= MAX_REPORTED_ERRORS:
                del self._errors[MAX_REPORTED_ERRORS:]
                return self._end()
        return False

    def close(self) -> None:
        self._file.close()

    def _errors_of(self, number: int, data: bytes) -> list[LineError]:
        """Errors of a line: of its ``custom_id``, its request, or both."""
        try:
            line = parse_line(number, data, self._limits.max_line_bytes)
        except BadLine as bad:
            return [bad.error]
        errors = []
        for check in (self._check_custom_id, self._check_request):
            try:
                check(line)
            except BadLine as bad:
                errors.append(bad.error)
        if self._division is not None:
            self._division.add(line)
        return errors

    def _check_custom_id(self, line: InputLine) -> None:
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            message = f"custom_id {line.custom_id[:80]!r} is used by an earlier line."
            raise BadLine("duplicate_custom_id", message, line.number, "custom_id")
        self._seen.add(digest)

    def _check_request(self, line: InputLine) -> None:
        check_target(line, self._limits.endpoint)
        try:
            body = parse_generation(cast(GenerationEndpoint, line.url), line.body)
            self._check_model(line.number, body.model)
            self._body_check.check(body)
        except RequestError as error:
            message = shortened(str(error))
            raise BadLine(error.code or "invalid_value", message, line.number, error.param) from None
        if has_warning(body):
            self._first_warning = self._first_warning or f"line {line.number}: {warning_of(body)}"
            self._num_warned += 1

    def _check_model(self, number: int, name: str | None) -> None:
        if name is None:
            return
        if name not in self._model_names:
            message = f"The model {name[:80]!r} does not exist. {self._model_hint}"
            raise BadLine("model_not_found", message, number, "model")
        if self._model is not None and name != self._model:
            message = f"All lines must name one model: {self._model!r} before, {name[:80]!r} here."
            raise BadLine("model_mismatch", message, number, "model")
        self._model = name

    def _end(self) -> bool:
        self._seen.clear()
        self.close()
        return True
