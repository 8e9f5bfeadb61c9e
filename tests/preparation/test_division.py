from __future__ import annotations

import json

from backfill.blending.resources import ResourceModel
from backfill.preparation.division import Division
from backfill.preparation.line_file import is_marked
from backfill.preparation.lines import parse_line

RESOURCES = ResourceModel(1e-5, 1e-9, 1e-8)


def division_of(num_lines: int, order: str = "blend") -> Division:
    division = Division(order, RESOURCES)  # type: ignore[arg-type]
    for number in range(1, num_lines + 1):
        body = {"prompt": f"document {number % 8} " * 100 + str(number), "max_tokens": 4}
        request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        division.add(parse_line(number, json.dumps(request).encode(), 10_000))
    return division


def numbers_in(part: bytes) -> set[int]:
    return {number for number in range(8 * len(part)) if is_marked(part, number)}


def test_each_line_is_in_one_part_and_each_run_finds_the_same() -> None:
    for order in ("blend", "fcfs"):
        parts = division_of(64, order).parts()
        assert parts == division_of(64, order).parts()
        assert len(parts) > 8
        assert sorted(number for part in parts for number in numbers_in(part)) == list(range(1, 65))
        halves = [numbers_in(part) for part in division_of(64, order).parts_of(2)]
        assert halves[0] | halves[1] == set(range(1, 65)) and not halves[0] & halves[1]
    assert division_of(4).parts() == [] == division_of(0).parts()


def test_lines_that_begin_alike_are_in_one_part() -> None:
    first, second = ({number % 8 for number in numbers_in(part)} for part in division_of(64).parts_of(2))
    assert len(first & second) <= 2, "only those on the cuts are computed twice"
