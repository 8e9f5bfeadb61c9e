"""Grammars are compiled for a tokenizer, cached, and refused with their place. See also tests/engine."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from backfill.core.errors import RequestError
from backfill.core.request import RequestId
from backfill.core.structured import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from backfill.execution import grammars
from backfill.execution.background_thread import BackgroundThread
from backfill.execution.grammar_masks import GrammarMasks
from backfill.execution.grammars import GrammarCompiler
from backfill.generation.tokenizer import Tokenizer

VOCAB_SIZE, END_TOKEN_IDS = 49152, (2, 0)


def triggered(schema: object) -> dict[str, Any]:
    structure = {"begin": "<a>", "schema": schema, "end": "</a>"}
    return {"structural_tag": {"triggers": ["<a>"], "structures": [structure]}}


DATE = {"type": "string", "format": "date"}


def calls(**fields: Any) -> dict[str, Any]:
    """Calls of f, which takes an integer, and of g, which takes any object."""
    schemas: dict[str, dict[str, Any]] = {
        "f": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/i"}},
            "$defs": {"i": {"type": "integer"}},
        },
        "g": {"type": "object"},
    }
    tags = [
        {
            "type": "tag",
            "begin": f'<call>{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "}</call>",
        }
        for name, schema in schemas.items()
    ]
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, **fields}


@pytest.fixture(scope="module")
def compiler(default_model: Path) -> GrammarCompiler:
    return GrammarCompiler(default_model, VOCAB_SIZE, END_TOKEN_IDS)


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(default_model)


@pytest.fixture(scope="module")
def is_whole(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> Callable[[StructuredOutputsParams, str], bool]:
    """Whether a text is an output that a grammar allows, and that may end there."""

    def is_whole(params: StructuredOutputsParams, text: str) -> bool:
        matcher = compiler.matcher(params)
        return matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()

    return is_whole


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json": {"properties": {"a": {"items": {"not": {}}}}}}, r"\(#/properties/a/items\): .*not"),
        ({"json": {"properties": {"a": {"type": "strin"}}}}, r"\(#/properties/a\): .*strin"),
        ({"json": {"anyOf": [{"type": "null"}, {"pattern": "(?=a)"}]}}, r"\(#/anyOf/1\): .*look-ahead"),
        (
            {"json": {"$ref": "#/$defs/b", "$defs": {"b": {"items": {"format": "x"}}}}},
            r"\(#/\$defs/b/items\)",
        ),
        ({"json": {"$ref": "https://example.org/schema"}}, "example.org"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, r"nothing satisfies it: minimum \(5\)"),
        (
            {
                "json": {
                    "properties": {
                        "free": {"enum": []},
                        "a": {"items": {"type": "integer", "enum": ["b"]}, "minItems": 1, "type": "array"},
                    },
                    "required": ["a"],
                    "type": "object",
                }
            },
            r"used \(#/properties/a/items\): nothing satisfies it: its types, const and enum exclude",
        ),
        (
            {"json": {"items": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}},
            r"used \(#/items\): the branches of oneOf must be known to exclude each other",
        ),
        (
            {"json": {"items": {"not": {}, "if": {}}}},
            r"\(#/items\): it has keywords that are not supported: ",
        ),
        ({"json": {"items": {"$ref": "#/b"}}}, r"\(#/items\): \$ref leads to '#/b', which does not exist"),
        ({"json": {"items": {"pattern": "(?x)a b"}}}, r"flags of \(\?x\) are not ECMA's, .*\(#/items\)"),
        ({"json": {"pattern": "(?i-u:a)"}}, r"flags of \(\?i-u\)"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "nothing satisfies it"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"json": {"$schema": "http://json-schema.org/draft-03/schema#", "extends": {}}}, "older than 4"),
        ({"json": {"items": {"minProperties": 2}}}, r"minProperties .*\(#/items\)"),
        ({"json": {"minProperties": 3, "required": ["a"]}}, "minProperties"),
        ({"json": {"enum": [1, {"a": [(1 << 53) + 1]}]}}, r"2\*\*53"),
        ({"json": {"const": {"a": "\x7f"}}}, "control characters"),
        ({"json": {"type": "integer", "minimum": (1 << 53) + 1}}, r"minimum .*2\*\*53"),
        ({"json": {"items": [{"exclusiveMinimum": 0, "maximum": 0.5}]}}, r"exclusiveMinimum .*\(#/items/0\)"),
        ({"json": {"exclusiveMaximum": True, "maximum": -1, "minimum": -1.5}}, "exclusiveMaximum"),
        ({"json": f'{{"const": 1{"0" * 400}}}'}, r"2\*\*53"),
        ({"json": f'{{"maximum": 1{"0" * 400}, "exclusiveMaximum": 0.5}}'}, "JSON schema"),
        ({"json": {"properties": {"a": {"pattern": "[]a]"}}}}, "must be escaped"),
        ({"json": {"pattern": "[+--]"}}, "must be escaped"),
        ({"json": {"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}}, "multipleOf"),
        (
            {
                "json": {
                    "properties": {"a": {"$ref": "#/$defs/cents"}},
                    "allOf": [{"additionalProperties": {"anyOf": [{"multipleOf": 100_000_000}]}}],
                    "$defs": {"cents": {"multipleOf": 0.01}},
                }
            },
            r"multipleOf .*\(#/a\)",
        ),
        (
            {"json": {"prefixItems": [{}, {"multipleOf": 0.01}], "allOf": [{"items": {"multipleOf": 1e8}}]}},
            r"multipleOf .*\(#/1\)",
        ),
        ({"json": {"items": {"multipleOf": True}}}, r"multipleOf must be .*true \(#/items\)"),
        ({"json": {"multipleOf": -2}}, "multipleOf must be .*-2"),
        ({"json": '{"anyOf": [{"multipleOf": NaN}, {"multipleOf": 2}]}'}, "NaN is not a finite number"),
        ({"json": '{"const": 1e999}'}, "1e999 is not a finite number"),
        (
            {"json": {"$ref": "#/components/a", "components": {"a": {"minProperties": 2}}}},
            r"minProperties .*\(#/components/a\)",
        ),
        (
            {"json": {"$ref": "#/$defs/b%2Fx", "$defs": {"b": {"$id": "b", "x": {"format": "date"}}}}},
            "inner .id",
        ),
        ({"json": {"$ref": "b#/x", "$defs": {"b": {"$id": "b", "x": {"format": "date"}}}}}, "inner .id"),
        ({"json": "{"}, "it is not valid JSON: .*char 1"),
        ({"json": "[]"}, r"it must be an object, got \[\]"),
        ({"json": "[" * 60_000}, "JSON schema"),
        ({"json": '{"items": ' * 3000 + "{}" + "}" * 3000}, "more than 128 levels"),
        ({"structural_tag": "[" * 3000}, "more than 128 levels"),
        ({"regex": "[a"}, r"expression cannot be used: unclosed character class, in '\[a'\.$"),
        (
            {"regex": r"\bword"},
            r"expression cannot be used: \\b, \\B and look-around are not supported, in '\\bword'",
        ),
        ({"json": {"items": {"pattern": "(a"}}}, r"cannot be used \(#/items\): unclosed group, in '\(a'\.$"),
        (
            {"grammar": 'start: "a" b'},
            r"The grammar cannot be used: line 1, column 8: unknown name: \"b\"\.$",
        ),
        ({"structural_tag": {"structures": []}}, "structural tag .* no 'triggers'"),
        ({"structural_tag": {"triggers": ["<"], "structures": []}}, "must not be empty"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "a", "schema": {}, "end": ""}]}},
            "no trigger begins 'a'",
        ),
        (triggered({"x-guidance": {"lenient": True}, "not": {}}), "structural tag .*not"),
        (triggered('{"minProperties": 2}'), "minProperties"),
        ({"grammar": '{ x }\nstart: "a"'}, "The grammar cannot be used: key must be a string"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "types of format are .* got 'any_text'"),
        ({"structural_tag": {"format": {"type": "tag", "begin": "a"}}}, "no 'content'"),
        *(
            ({"structural_tag": {"format": calls(at_most=at_most)}}, "at_most must be a whole number")
            for at_most in (0, -3, True, 1.5, "4")
        ),
        (
            {"structural_tag": {"format": {"type": "tags_with_separator", "tags": [], "separator": ""}}},
            "must not be empty",
        ),
        (
            {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {}}}}},
            "structural tag .*not",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(
    compiler: GrammarCompiler, fields: dict[str, Any], expected: str
) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=expected) as raised:
            compiler.matcher(StructuredOutputsParams(**fields))
        assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"choice": ["a", 'é😀"\n']}, 'é😀"\n'),
        ({"grammar": 'root ::= "x" [0-9]+'}, "x12"),
        ({"grammar": "start: WORD\nWORD: /[a-z]+/"}, "word"),
        ({"json": True}, None),
        ({"json": {}}, '{"a": [1, "b"]}'),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, '[1,"b"]'),
        ({"json_object": True}, '{"a":\n    1}'),
        ({"regex": "^(a|b)+$"}, "abba"),
        (
            {
                "structural_tag": {
                    "triggers": ["<|im_start|>"],
                    "structures": [{"begin": "<|im_start|>x", "schema": {"type": "integer"}, "end": "!"}],
                }
            },
            "so <|im_start|>x17! done",
        ),
    ],
)
def test_what_follows_a_grammar_is_accepted(
    compiler: GrammarCompiler, tokenizer: Tokenizer, fields: dict[str, Any], text: str | None
) -> None:
    if text is None:
        with pytest.raises(RequestError):
            StructuredOutputsParams(**fields)
        return
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = compiler.matcher(StructuredOutputsParams(**fields))
    assert matcher.consume_tokens(token_ids) and matcher.is_accepting()
    other = compiler.matcher(StructuredOutputsParams(**fields))  # it begins at the start
    assert other.consume_tokens(token_ids) and other.is_accepting()


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        # A key that is written with escapes is no other key.
        ({"properties": {"foo": {"type": "integer"}}}, ['{"foo": 1}', '{"fo": "x"}'], [r'{"\u0066oo": "x"}']),
        ({"patternProperties": {"^f": {"type": "integer"}}}, ['{"g": "x"}'], [r'{"\u0066oo": "x"}']),
        ({"properties": {"\x01": {"type": "integer"}}}, [r'{"\u0001": 1}'], [r'{"\u0001": "x"}']),
        ({"minProperties": 2, "required": ["a"]}, ['{"a": 1, "b": 1}'], ['{"a": 1, "a": 1}', '{"b": 1}']),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.1", "1"], ["0", "1.1"]),
        ({"multipleOf": 0.01, "allOf": [{"multipleOf": 25}], "type": "number"}, ["50"], ["10", "0.01"]),
        (  # values of multipleOf that do not meet
            {
                "properties": {
                    "price": {"type": "number", "multipleOf": 0.01},
                    "lot": {"type": "integer", "multipleOf": 100_000_000},
                    "prices": {"items": {"$ref": "#/properties/price"}},
                }
            },
            ['{"price": 0.25, "lot": 200000000, "prices": [0.5]}'],
            ['{"price": 0.005}', '{"lot": 1}'],
        ),
        ({"default": {"minProperties": 4}, "examples": [{"const": 1 << 60}]}, ["1"], ["a"]),
        (
            {"properties": {"enum": {"type": "integer", "maximum": (1 << 63) - 1}}},
            ['{"enum": 1}'],
            [f'{{"enum": {1 << 63}}}'],
        ),
        (
            {"properties": {"$schema": {"const": "http://json-schema.org/draft-03/schema#"}}},
            ['{"$schema": "http://json-schema.org/draft-03/schema#"}'],
            ['{"$schema": ""}'],
        ),
        (
            {"$ref": "#/components/schemas/a~1b/0", "components": {"schemas": {"a/b": [DATE]}}},
            ['"2023-02-28"', '"2024-02-29"', '"2000-02-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"'],
        ),
        (
            {
                "$ref": "#/definitions/a/definitions/b",
                "definitions": {"a": {"definitions": {"b": DATE}}, "c": {"$id": "c"}},
            },
            ['"2024-02-29"'],
            ['"2023-02-29"'],
        ),
        (DATE, ['"2024-02-29"'], ['"2023-02-29"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59Z"'], ['"2024-02-28T23:59:60Z"']),
        # A class of all control characters has " and \\ no more than what it says.
        ({"type": "string", "pattern": '^[^"]+$'}, [r'"a\n\\"'], [r'"a\"b"']),
        ({"type": "string", "pattern": r"^[\x00-!#-\[\]-~]*$"}, [r'"a\n!"'], [r'"a\"b"', r'"a\\"']),
        ({"type": "string", "pattern": "^[\\u0000-\\u001fab]*$"}, [r'"a\n"'], [r'"a\"b"', r'"a\\"']),
        ({"type": "string", "pattern": "^[\x00-\x1fab]*$"}, [r'"a\n"'], [r'"a\"b"', r'"a\\"']),
        ({"type": "string", "pattern": r"^([\x{0}-\x1f]|[a-z])*$"}, [r'"a\n"'], [r'"a\"b"', r'"a\\"']),
        ({"type": "string", "pattern": r"^(?:\p{Cc}|a|b)*$"}, [r'"a\n"'], [r'"a\"b"', r'"a\\"']),
        ({"type": "string", "pattern": r"^[\p{Cc}a-z]*$"}, [r'"a\n"'], [r'"a\"b"', r'"a\\"']),
        ({"type": "string", "pattern": r"^[^\P{L}_]*$"}, ['"aé"'], ['"1"', r'"a\"b"']),
        ({"type": "string", "pattern": r"^(?i)a(?-i:[(?x])\(?x(?:b)$"}, ['"A?(xb"', '"axxb"'], ['"ab"']),
        ({"type": "string", "pattern": r"^\P{P}*$"}, [r'"a\n"'], [r'"a\"b"', r'"a\\"', '"."']),
        (
            {"patternProperties": {r'^[^"\\]+$': {"type": "integer"}}, "additionalProperties": False},
            ['{"a": 1}'],
            [r'{"a\"b": 1}', r'{"a\\b": 1}', '{"a": "x"}'],
        ),
        ({"type": "integer", "maximum": (1 << 63) - 1}, [f"{(1 << 63) - 1}"], [f"{1 << 63}"]),
        (
            {"properties": {"minProperties": {"minimum": 3}}},
            ['{"minProperties": 3}'],
            ['{"minProperties": 2}'],
        ),
    ],
)
def test_no_output_of_a_schema_is_invalid(
    is_whole: Callable[[StructuredOutputsParams, str], bool],
    schema: dict[str, Any],
    allowed: list[str],
    refused: list[str],
) -> None:
    params = StructuredOutputsParams(json=schema)
    assert [text for text in allowed if not is_whole(params, text)] == []
    assert [text for text in refused if is_whole(params, text)] == []


@pytest.mark.slow
def test_the_largest_grammars_take_seconds_at_most_and_the_cache_is_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_CACHED", 4)
    patterns = [f"^[a-z]{{3,{index % 50 + 4}}}$" for index in range(900)]
    choices = [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(8)]
    hostile: list[dict[str, Any]] = [
        {"json": {"properties": {f"p{index}": {"pattern": each} for index, each in enumerate(patterns)}}},
        {"json": {"enum": [f"value {index}" for index in range(3500)]}},
        {"json": {"allOf": choices}},
        {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
        {"regex": ".*a.{1000}" * 20},
        {"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000},
    ]
    meeting = {"allOf": [{"pattern": f"(a.{{{index}}}b|c)+"} for index in range(1, 40)]}
    refused: list[dict[str, Any]] = [
        {"json": meeting},
        {"json": {"properties": {"a": meeting, "b": {"not": {}}}}},  # no part of it is tried alone
        {"grammar": f"start: %json {json.dumps(meeting)}"},
        {"json": {"patternProperties": {f"^a{index}[a-z]{{1,40}}$": {} for index in range(1500)}}},
    ]
    began = time.monotonic()
    for fields in refused:
        with pytest.raises(RequestError, match=r"patterns take over|not supported"):
            compiler.matcher(StructuredOutputsParams(**fields))
    for fields in hostile:
        params = StructuredOutputsParams(**fields)
        assert len(params.text) <= MAX_GRAMMAR_CHARS
        try:
            compiler.matcher(params)
        except RequestError:
            continue
    assert time.monotonic() - began < 30
    assert len(compiler._compiled) == 4


MANY_PATTERNS = StructuredOutputsParams(
    json={"properties": {f"p{index}": {"pattern": f"^a{index}$"} for index in range(12)}}
)


@pytest.fixture
def loaded_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilers of a test have the tokenizer of the others."""
    tokenizer = compiler._loaded_tokenizer()
    monkeypatch.setattr(grammars, "_load_tokenizer", lambda *_: tokenizer)


@pytest.mark.usefixtures("loaded_once")
def test_a_machine_too_busy_to_try_patterns_may_try_again(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(default_model, VOCAB_SIZE, END_TOKEN_IDS)
    errors: list[Exception] = [BlockingIOError("no process"), subprocess.TimeoutExpired("python", 30)]

    def run(*_: Any, **__: Any) -> NoReturn:
        raise errors[-1]

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        with pytest.raises(RequestError, match="too busy to try its patterns"):
            compiler.matcher(MANY_PATTERNS)
        del errors[-1]
        with pytest.raises(RequestError, match="too busy to try its patterns"):
            compiler.matcher(MANY_PATTERNS)
        trusting = GrammarCompiler(default_model, VOCAB_SIZE, END_TOKEN_IDS, bounds_time=False)
        assert trusting.matcher(MANY_PATTERNS), "an engine tries nothing again"
    assert compiler.matcher(MANY_PATTERNS)


@pytest.mark.usefixtures("loaded_once")
def test_the_time_of_a_trial_is_not_that_of_compiling(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, late_s = 0.0, 0.0

    def trial(*_: Any, **__: Any) -> subprocess.CompletedProcess[bytes]:
        nonlocal now_s
        now_s += 20
        return subprocess.CompletedProcess([], 0)

    def monotonic() -> float:
        nonlocal now_s
        now_s += late_s
        return now_s

    monkeypatch.setattr(subprocess, "run", trial)
    monkeypatch.setattr(time, "monotonic", monotonic)
    compiler, params = GrammarCompiler(default_model, VOCAB_SIZE, END_TOKEN_IDS), MANY_PATTERNS
    late_s = 6.0
    with pytest.raises(RequestError, match="takes over 5 s"):
        compiler.matcher(params)
    late_s = 0.0
    assert compiler.matcher(params)


def test_a_step_of_grammars_that_all_fail_has_their_errors(compiler: GrammarCompiler) -> None:
    masks, name = GrammarMasks(compiler, 1), RequestId("r")
    output = masks.output(StructuredOutputsParams(json={"not": {}}))
    assert "not" in masks.begin({name: output}).result(30).errors[name]
    masks.close()


def test_masks_wait_for_a_grammar_that_is_compiled_beside_the_steps(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compile = threading.Event()
    compile_now = GrammarCompiler._compile

    def compile_later(self: GrammarCompiler, params: StructuredOutputsParams) -> Any:
        assert may_compile.wait(30)
        return compile_now(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_later)
    masks = GrammarMasks(compiler, 1)
    params = StructuredOutputsParams(choice=["so", "a slow one"])
    compiling = masks.compile(params)
    output, name = masks.output(params), RequestId("r")
    filling = masks.begin({name: output})
    assert not compiling.done() and not filling.done()
    may_compile.set()
    first = filling.result(30)
    assert compiling.done() and masks.compile(params).done()
    allowed = np.flatnonzero(~first.forbidden[first.rows[name]])
    assert not first.errors and 1 < len(allowed) < 20
    for token_id in (*_encoded(compiler, "so"), 2):
        assert not masks.begin({name: output}).result(30).forbidden[0, token_id]
        output.append(token_id)
    ended = masks.begin({name: output}).result(30)
    assert set(np.flatnonzero(~ended.forbidden[0])) == set(END_TOKEN_IDS)
    output.append(1234)
    assert "grammar" in masks.begin({name: output}).result(30).errors[name]
    masks.close()


def _encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    assert compiler._tokenizer is not None
    return compiler._tokenizer.tokenize_str(text)


class Panic(BaseException):
    """As Rust's panics come: no Exception."""


def test_a_panic_over_a_grammar_ends_its_request_and_one_over_masks_the_step(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, bad, good = GrammarMasks(compiler, 1), RequestId("bad"), RequestId("good")
    compile_now = GrammarCompiler._compile

    def panics_over_one(self: GrammarCompiler, params: StructuredOutputsParams) -> Any:
        if params.regex == "b":
            raise Panic
        return compile_now(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", panics_over_one)
    outputs = {name: masks.output(StructuredOutputsParams(regex=name[0])) for name in (bad, good)}
    found = masks.begin(outputs).result(30)
    assert "could not be compiled" in found.errors[bad] and good not in found.errors

    def panics(*_: object) -> object:
        raise Panic

    monkeypatch.setattr("llguidance.numpy.fill_next_token_bitmask_par", panics)
    with pytest.raises(RuntimeError, match="Panic"):
        masks.begin({good: outputs[good]}).result(30)
    masks.close()


def test_a_panic_in_the_library_reaches_who_waits_and_ends_no_thread() -> None:
    def panics() -> None:
        raise Panic

    thread = BackgroundThread("test")
    with pytest.raises(RuntimeError, match="Panic"):
        thread.submit(panics).result(timeout=10.0)
    assert thread.submit(lambda: 1).result(timeout=10.0) == 1
    thread.close()


def test_a_model_without_a_usable_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(tmp_path, 100, (2,)).matcher(StructuredOutputsParams(regex="a"))


def thought(mark: str) -> dict[str, Any]:
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": mark}


F = '<call>{"name": "f", "arguments": {"a": 3}}</call>'
G = '<call>{"name": "g", "arguments": {"b": [1]}}</call>'


@pytest.mark.parametrize(
    ("form", "allowed", "refused"),
    [
        (calls(), [F, f"{F}\n{G}"], ["", f"{F}{G}", F.replace("3", '"3"'), F.replace('"f"', '"h"')]),
        (calls(stop_after_first=True), [F, G], [f"{F}\n{G}"]),
        (calls(at_most=1), [F, G], ["", f"{F}\n{G}"]),
        (calls(at_most=2), [F, f"{F}\n{G}"], ["", f"{F}\n{G}\n{F}"]),
        (calls(at_least_one=False), ["", F], ["a"]),
        (
            {"type": "sequence", "elements": [thought("</think>"), calls()]},
            [f"{{ hm</think>{F}", f"</think>{G}"],
            [F, f"hm</think> {F}"],
        ),
        (  # a special token, which is not its spelling
            {
                "type": "sequence",
                "elements": [thought("<|im_start|>"), {"type": "const_string", "value": "x"}],
            },
            ["hm<|im_start|>x"],
            ["hmx", "<|im_start|>y"],
        ),
        (
            {"type": "or", "elements": [calls(), {"type": "json_schema", "json_schema": {"const": 1}}]},
            [F, "1"],
            ["2"],
        ),
    ],
)
def test_an_output_has_the_format_of_a_structural_tag(
    is_whole: Callable[[StructuredOutputsParams, str], bool],
    form: dict[str, Any],
    allowed: list[str],
    refused: list[str],
) -> None:
    params = StructuredOutputsParams(structural_tag={"format": form})
    assert [text for text in allowed if not is_whole(params, text)] == []
    assert [text for text in refused if is_whole(params, text)] == []
