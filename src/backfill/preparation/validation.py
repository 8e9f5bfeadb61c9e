"""Checks an input file before any of its lines runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from backfill.preparation.lines import BadLine, LineError, check_target, model_of, parse_line, read_lines
from backfill.preparation.messages import InputLimits, InputReport

MAX_REPORTED_ERRORS = 100

_DIGEST_BYTES = 16


class InputCheck:
    """Reads a file in slices, so that a caller can do other things between them.

    Memory is bounded but for 16 bytes and their set entry for each ``custom_id``.
    """

    def __init__(self, path: Path, limits: InputLimits) -> None:
        self._file = path.open("rb")
        self._lines = read_lines(self._file, limits.max_line_bytes)
        self._limits = limits
        self._model_names = frozenset(limits.model_names)
        self._model_hint = limits.model_hint or f"This server has: {', '.join(sorted(limits.model_names))}."
        self._seen: set[bytes] = set()
        self._total = 0
        self._model: str | None = None
        self._errors: list[LineError] = []

    @property
    def report(self) -> InputReport:
        return InputReport(self._total, self._model, self._errors)

    def advance(self, num_lines: int = 2000) -> bool:
        """Check the next lines; True when the file has been read or is bad beyond what is reported."""
        for _ in range(num_lines):
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
            try:
                self._check(*entry)
            except BadLine as bad:
                self._errors.append(bad.error)
                if len(self._errors) == MAX_REPORTED_ERRORS:
                    return self._end()
        return False

    def close(self) -> None:
        self._file.close()

    def _check(self, number: int, data: bytes) -> None:
        line = parse_line(number, data, self._limits.max_line_bytes)
        check_target(line, self._limits.endpoint)
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            message = f"custom_id {line.custom_id[:80]!r} is used by an earlier line."
            raise BadLine("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(digest)
        self._check_model(number, model_of(line))

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
