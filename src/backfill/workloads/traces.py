"""Reads traces of real services: lengths, and arrival times and prompts where the trace has them.

CSV columns are found by name, because editions of one trace order them differently.

=============================  ===================================================  ====================
trace                          columns (CSV) or keys (JSONL)                        time
=============================  ===================================================  ====================
Azure LLM inference 2023/2024  TIMESTAMP, ContextTokens, GeneratedTokens            date and time
Vidur's edition of it          arrived_at, num_prefill_tokens, num_decode_tokens    seconds
BurstGPT 1, 2, 3               Timestamp, Request tokens, Response tokens           seconds
ShareGPT lengths (NanoFlow)    TIMESTAMP ("XXX"), ContextTokens, GeneratedTokens    none
arXiv lengths (Vidur)          num_prefill_tokens, num_decode_tokens                none
Mooncake                       timestamp, input_length, output_length              milliseconds
=============================  ===================================================  ====================
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import Instants
from backfill.workloads.lengths import Lengths


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests of a trace, in order of arrival.

    Args:
        input_lens, output_lens: tokens, each at least 1.
        arrivals_at_s: arrival times from the first request, which is at 0; None when the trace has no times.
    """

    input_lens: Lengths
    output_lens: Lengths
    arrivals_at_s: Instants | None = None

    def __len__(self) -> int:
        return len(self.input_lens)

    def select(self, rows: slice | Iterable[int]) -> Trace:
        """These rows in this order. Arrivals count from the first of them."""
        index = np.arange(len(self))[rows] if isinstance(rows, slice) else np.fromiter(rows, dtype=np.int64)
        arrivals = None if self.arrivals_at_s is None else self.arrivals_at_s[index]
        return Trace(
            self.input_lens[index],
            self.output_lens[index],
            None if arrivals is None else arrivals - (arrivals[0] if len(arrivals) else 0),
        )


class _Format(NamedTuple):
    name: str
    time: str | None
    input: str
    output: str


# The first format whose columns a file has is its format, so those with more columns come first.
_CSV_FORMATS = (
    _Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _Format("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens"),
    _Format("lengths", None, "ContextTokens", "GeneratedTokens"),
    _Format("lengths", None, "num_prefill_tokens", "num_decode_tokens"),
)
_SECONDS_PER_UNIT = 1e-3  # of the times in JSONL
_NO_TIME = "XXX"  # in every row of NanoFlow's edition of the ShareGPT lengths


@dataclass(slots=True)
class _Row:
    line: int
    time: float | None
    input_len: int
    output_len: int


def read_trace(path: Path) -> Trace:
    """Read a JSONL trace with Mooncake's keys if the name ends in .jsonl or .ndjson, else a CSV.

    Raises: ConfigError naming the file, the line and what is expected, when columns are missing, a number is
        bad or negative, times decrease (except Azure's, which are sorted), or no request is left.
    """
    if path.suffix in (".jsonl", ".ndjson"):
        return _trace_of(path, list(_json_rows(path)))
    rows, is_sorted = _csv_rows(path)
    if is_sorted:
        rows.sort(key=lambda row: (row.time, row.line))
    return _trace_of(path, rows)


def _csv_rows(path: Path) -> tuple[list[_Row], bool]:
    """Rows of the file, and whether its times are dates, which are not in order."""
    with _open(path) as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        layout = _csv_format(path, columns)
        rows: list[_Row] = []
        read_time: Callable[[str], float] | None = None
        for position, record in enumerate(_checked(path, reader)):
            at = _Place(path, reader.line_num)
            text = None if layout.time is None else record[layout.time]
            if position == 0 and layout.time is not None:
                read_time = _time_reader(layout, text or "")
            time = None
            if read_time is not None:
                time = at.time(str(layout.time), text, read_time)
            rows.append(
                _Row(
                    reader.line_num,
                    time,
                    at.tokens(layout.input, record[layout.input]),
                    at.tokens(layout.output, record[layout.output]),
                )
            )
    return rows, read_time is _seconds_of_date


def _csv_format(path: Path, columns: list[str]) -> _Format:
    for layout in _CSV_FORMATS:
        if {layout.time or layout.input, layout.input, layout.output} <= set(columns):
            return layout
    known = "; ".join(
        ",".join(filter(None, (f.time, f.input, f.output))) + f" ({f.name})" for f in _CSV_FORMATS
    )
    found = ",".join(columns)[:200] or "no header"
    raise ConfigError(f"{path}, line 1: columns are missing. Expected one of: {known}. Found: {found}.")


def _checked(path: Path, reader: csv.DictReader[str]) -> Iterator[Mapping[str, str | None]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not CSV ({error}).") from error


def _time_reader(layout: _Format, first: str) -> Callable[[str], float] | None:
    if layout.name != "Azure":
        return float
    return None if first.strip() == _NO_TIME else _seconds_of_date


def _seconds_of_date(text: str) -> float:
    """Unix seconds of ``2023-11-16 18:15:46.6805900``, with or without an offset from UTC.

    Python's own parser takes up to 6 decimals, and Azure's traces have 7.
    """
    date, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    if dot and not digits:
        raise ValueError("no digits after the point")
    moment = datetime.fromisoformat(date + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + float(f"0.{digits or 0}")


def _json_rows(path: Path) -> Iterator[_Row]:
    with _open(path) as lines:
        for line, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            at = _Place(path, line)
            try:
                entry = json.loads(text)
            except json.JSONDecodeError as error:
                raise at.error(f"not JSON ({error.msg})") from error
            required = ("timestamp", "input_length", "output_length")
            missing = [key for key in required if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise at.error(
                    'expected {"timestamp": ms, "input_length": n, "output_length": n}, '
                    f"without {', '.join(missing)}"
                )
            yield _Row(
                line,
                at.time("timestamp", entry["timestamp"], float) * _SECONDS_PER_UNIT,
                at.tokens("input_length", entry["input_length"]),
                at.tokens("output_length", entry["output_length"]),
            )


class _Place(NamedTuple):
    """File and line of a value, for errors."""

    path: Path
    line: int

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.line}: {what}.")

    def tokens(self, name: str, value: Any) -> int:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (number >= 0 and number.is_integer()) or isinstance(value, bool):
            raise self.error(f"{name} must be a whole number of tokens of at least 0, got {_short(value)}")
        return int(number)

    def time(self, name: str, value: Any, read: Callable[[str], float]) -> float:
        expected = (
            "a date and time such as 2023-11-16 18:15:46.6805900" if read is _seconds_of_date else "a number"
        )
        try:
            time = read(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise self.error(f"{name} must be {expected}, got {_short(value)}") from error
        if not (math.isfinite(time) and time >= 0):
            raise self.error(f"{name} must be {expected} of at least 0, got {_short(value)}")
        return time


def _trace_of(path: Path, rows: list[_Row]) -> Trace:
    for before, after in itertools.pairwise(rows):
        if before.time is not None and after.time is not None and after.time < before.time:
            raise ConfigError(
                f"{path}, line {after.line}: time {after.time:g} s is before that of line {before.line}, "
                f"{before.time:g} s. Expected ascending times; sort the file by time."
            )
    # The recorded service failed those without tokens.
    kept = [row for row in rows if row.input_len > 0 and row.output_len > 0]
    if not kept:
        raise ConfigError(f"{path}: no request with at least 1 token of input and output.")
    times = [row.time for row in kept if row.time is not None]
    arrivals = np.array(times) - times[0] if times else None
    return Trace(
        np.array([row.input_len for row in kept], dtype=np.int64),
        np.array([row.output_len for row in kept], dtype=np.int64),
        arrivals,
    )


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", errors="replace", newline="")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
