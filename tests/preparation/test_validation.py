"""The check of an input file."""

from __future__ import annotations

import json
import re
import timeit
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.preparation.lines import parse_line
from backfill.preparation.messages import InputLimits, InputReport
from backfill.preparation.validation import MAX_REPORTED_ERRORS, InputCheck
from backfill.protocol.body_check import BodyCheck
from tests.builders import make_info
from tests.jobs.doubles import URL, input_line, input_of

CHATS = "/v1/chat/completions"


def prompt_line(index: int, **body: Any) -> bytes:
    return input_line(index, body={"prompt": "x", **body})


def checked(
    tmp_path: Path, content: bytes, body_check: BodyCheck | None = None, **options: Any
) -> InputReport:
    path = tmp_path / "input"
    path.write_bytes(content)
    limits = {"endpoint": URL, "max_lines": 10, "max_line_bytes": 1000, **options}
    check = InputCheck(path, InputLimits(model_names=("m", "alias"), **limits), body_check or BodyCheck())
    while not check.advance(100):
        pass
    return check.report


def test_a_file_is_read_in_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def open_and_note(path: Path, mode: str, buffering: int = -1) -> BinaryIO:
        sizes.append(buffering)
        return cast(BinaryIO, open(path, mode, buffering))

    monkeypatch.setattr(Path, "open", open_and_note)
    checked(tmp_path, input_of(2))
    assert sizes[-1] >= 1 << 20, "other threads starve when the check reads often"


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe\n", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_value", None),
        (b"[1]\n", "invalid_value", None),
        (b'{"custom_id": "a"}\n', "missing_required_parameter", "method"),
        (input_line(1, custom_id=""), "invalid_value", "custom_id"),
        (input_line(1, custom_id=7), "invalid_value", "custom_id"),
        (
            rb'{"custom_id": "half \ud800", "method": "POST", "url": "u", "body": {}}',
            "invalid_json_line",
            None,
        ),
        (input_line(1, custom_id="x" * 513), "invalid_value", "custom_id"),
        (input_line(0), "duplicate_custom_id", "custom_id"),
        (input_line(1, method="GET"), "invalid_value", "method"),
        (input_line(1, url="/v1/chat/completions"), "url_mismatch", "url"),
        (input_line(1, body=[]), "invalid_value", "body"),
        (prompt_line(1, model="other"), "model_not_found", "model"),
        (prompt_line(1, model="alias"), "model_mismatch", "model"),
        (prompt_line(1, model=3), "invalid_value", "model"),
        (input_line(1, body={}), "missing_required_parameter", "prompt"),
        (prompt_line(1, prompt=[]), "invalid_value", "prompt"),
        (prompt_line(1, prompt={"a": 1}), "invalid_value", "prompt"),
        (prompt_line(1, cache_salt=""), "invalid_value", "cache_salt"),
        (prompt_line(1, cache_salt="s" * 257), "invalid_value", "cache_salt"),
        (prompt_line(1, stream=True), "invalid_value", "stream"),
        (prompt_line(1, max_tokens=0), "invalid_value", "max_tokens"),
        (prompt_line(1, max_tokens=2**30), "invalid_value", "max_tokens"),
        (prompt_line(1, temperature=99), "invalid_value", "temperature"),
        (prompt_line(1, top_p="high"), "invalid_value", "top_p"),
        (prompt_line(1, tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
        (prompt_line(1, service_tier="Flex"), "invalid_value", "service_tier"),
        (prompt_line(1, slo={"ttft": 1}), "invalid_value", "slo"),
        (input_line(1, body={"prompt": "x" * 2000}), "invalid_value", None),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, code: str, param: str | None) -> None:
    check = checked(tmp_path, prompt_line(0, model="m") + line)
    assert [(error.code, error.line, error.param) for error in check.errors] == [(code, 2, param)]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"[1]", "an array"),
        (b' "x"', "a string"),
        (b"3", "a number"),
        (b"-0.5", "a number"),
        (b"true", "true"),
        (b"false", "false"),
        (b"null", "null"),
    ],
)
def test_a_line_or_a_body_that_is_no_object_is_told_what_it_is(
    tmp_path: Path, value: bytes, kind: str
) -> None:
    body = input_line(1).partition(b'"body":')[0] + b'"body": ' + value + b"}\n"
    for line, what, param in ((value + b"\n", "This line", None), (body, "body", "body")):
        (error,) = checked(tmp_path, input_line(0) + line).errors
        assert (error.code, error.line, error.param) == ("invalid_value", 2, param)
        assert error.message == f"{what} must be a JSON object, got {kind}."


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (7, "a number"),
        (0.5, "a number"),
        (True, "a boolean"),
        (None, "null"),
        ([1], "an array"),
        ({}, "an object"),
    ],
)
def test_a_field_that_is_no_string_is_told_what_it_is(tmp_path: Path, value: Any, kind: str) -> None:
    (error,) = checked(tmp_path, input_line(1, custom_id=value)).errors
    assert (error.code, error.param) == ("invalid_value", "custom_id")
    assert error.message == f"custom_id must be a string, got {kind}."


@pytest.mark.parametrize(
    ("content", "total", "errors"),
    [
        (b"", 0, [("empty_file", None)]),
        (b"\n \n", 0, [("empty_file", None)]),
        (b"\n" + input_line(0) + b"  \n\n" + input_line(1).strip(), 2, []),
        (b"\xef\xbb\xbf" + input_of(10), 10, []),
        (input_of(11), 11, [("too_many_tasks", None)]),
        (json.dumps({"x": "y" * 5000}).encode() + b"\n" + input_line(1), 2, [("invalid_value", 1)]),
    ],
)
def test_lines_are_counted(
    tmp_path: Path, content: bytes, total: int, errors: list[tuple[str, int | None]]
) -> None:
    check = checked(tmp_path, content)
    assert (check.total, [(error.code, error.line) for error in check.errors]) == (total, errors)


def test_the_number_of_listed_errors_is_limited(tmp_path: Path) -> None:
    check = checked(tmp_path, b"{\n" * 500, max_lines=1000)
    assert len(check.errors) == MAX_REPORTED_ERRORS


def test_without_an_endpoint_each_line_names_its_own(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    content = input_line(0) + input_line(1, url=CHATS, body=chat) + input_line(2, url="/v1/embeddings")
    errors = checked(tmp_path, content, endpoint=None).errors
    assert [(error.code, error.line) for error in errors] == [("invalid_value", 3)]
    (error,) = checked(tmp_path, input_line(0, url=CHATS), endpoint=None).errors
    assert (error.code, error.param) == ("missing_required_parameter", "messages")


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ("hi", "invalid_value"),
        ([], "invalid_value"),
        ([{"role": "robot", "content": "x"}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "invalid_value"),
        ([{"content": "x"}], "missing_required_parameter"),
    ],
)
def test_a_bad_conversation_is_reported(tmp_path: Path, messages: Any, code: str) -> None:
    content = input_line(0, url=CHATS, body={"messages": messages})
    (error,) = checked(tmp_path, content, endpoint=CHATS).errors
    assert (error.code, error.line, error.param) == (code, 1, "messages")


def test_both_errors_of_a_line_are_reported(tmp_path: Path) -> None:
    content = input_line(0) + input_line(0, body={"prompt": "x", "n": 0})
    errors = checked(tmp_path, content).errors
    assert [(error.line, error.param) for error in errors] == [(2, "custom_id"), (2, "n")]


def test_the_limits_of_an_engine_are_checked_once_it_is_known(tmp_path: Path) -> None:
    info = make_info(num_blocks=8, block_size=16)  # a context of 128 tokens
    most = info.max_model_len
    content = (
        prompt_line(0, max_tokens=most)
        + prompt_line(1, max_tokens=most - 1)
        + prompt_line(2, prompt=[5] * most, max_tokens=1)
        + prompt_line(3, prompt=[info.vocab_size])
        + prompt_line(4, stop_token_ids=[info.vocab_size])
        + prompt_line(5, prompt=[5] * most, truncate_prompt_tokens=3, max_tokens=1)
    )
    assert checked(tmp_path, content).errors == [], "without an engine they are found when the lines run"
    errors = checked(tmp_path, content, BodyCheck(info=info)).errors
    assert [(error.line, error.code, error.param) for error in errors] == [
        (1, "context_length_exceeded", "max_tokens"),
        (3, "context_length_exceeded", "prompt"),
        (4, "invalid_value", "prompt"),
        (5, "invalid_value", "stop_token_ids"),
    ]


def test_fields_without_an_effect_are_reported_once_a_file(tmp_path: Path) -> None:
    content = input_line(0) + prompt_line(1, max_tokns=3) + prompt_line(2, slo={}) + prompt_line(3, user="u")
    report = checked(tmp_path, content)
    assert report.errors == []
    first = "fields with no effect, first in line 2: unknown fields: max_tokns (did you mean max_tokens?)."
    assert report.warning == f"2 lines have {first}"
    once = checked(tmp_path, input_line(0) + prompt_line(1, max_tokns=3))
    assert once.warning == f"1 line has {first}"
    assert checked(tmp_path, input_of(2)).warning is None


def test_fields_without_an_effect_fail_a_strict_check(tmp_path: Path) -> None:
    content = input_line(0) + prompt_line(1, max_tokns=3) + prompt_line(2, user="u")
    errors = checked(tmp_path, content, BodyCheck(is_strict=True)).errors
    assert [(error.line, error.code, error.param) for error in errors] == [
        (2, "unknown_parameter", "max_tokns")
    ]


def test_a_message_echoes_a_bounded_part_of_a_line(tmp_path: Path) -> None:
    content = prompt_line(0, logit_bias={"9" * 5000: "x"})
    (error,) = checked(tmp_path, content, max_line_bytes=10_000).errors
    assert len(error.message) < 600


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"body": {"temperature": NaN}}', "NaN is not a number in JSON (byte 25)"),
        (b'{"body": {"temperature": -Infinity}}', "Infinity is not a number in JSON"),
        (b'{"body": {"a": 1,}}', "trailing comma in object (byte 17)"),
        (b'{"bo', "ends too early"),
        ("{}".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_line_that_is_not_json_is_reported_with_place_and_reason(
    tmp_path: Path, line: bytes, part: str
) -> None:
    (error,) = checked(tmp_path, line).errors
    assert (error.code, error.line) == ("invalid_json_line", 1)
    assert part in error.message


PROMPT = rb'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "%s"}}'


def test_half_a_surrogate_pair_in_a_body_is_replaced(tmp_path: Path) -> None:
    assert checked(tmp_path, PROMPT % rb"cut \ud83d").errors == []
    body = parse_line(1, PROMPT % rb"\ud83d \\ud800 \ud83d\ude00 \uDE00", 1000).body
    assert json.loads(body)["prompt"] == "\ufffd \\ud800 \U0001f600 \ufffd"


@given(st.lists(st.sampled_from([r"\\", r"\ud83d", r"\uDBFF", r"\ude00", r"\uDC00", r"\n", r"\"", "ud800"])))
def test_only_lone_halves_are_replaced(parts: list[str]) -> None:
    text = "".join(parts)
    whole = re.compile("[\ud800-\udfff]").sub("\ufffd", json.loads(f'"{text}"'))
    assert json.loads(parse_line(1, PROMPT % text.encode(), 1000).body)["prompt"] == whole


def test_a_lone_half_beside_many_escapes_costs_little() -> None:
    escapes = rb"\n" * 500_000
    with_lone_s, without_s = (
        min(timeit.repeat(partial(parse_line, 1, PROMPT % text, 2 << 20), number=1, repeat=3))
        for text in (escapes + rb"\ud800", escapes)
    )
    assert with_lone_s < 30 * without_s
