"""Schemas of public suites: the grammar compiler refuses each one, or allows nothing that is invalid.

    schema_suites.py JSON-Schema-Test-Suite/tests/draft2020-12 jsonschemabench/maskbench/data

Paths are files or folders of JSON: an object with `schema` and `tests`, or a list of them, each test with
`data` and `valid`. A folder named draft4 to draft7 says which draft its schemas are of. Instances are tried
as compact and as usual JSON, with escapes, a doubled key and other forms of numbers; random outputs of each
grammar are validated with `jsonschema`. Printed are the refused schemas by reason, valid instances that the
grammar has in no form, and what is wrong, which makes the exit status 1. What only a format forbids, or the
media type of a content, is not wrong: `jsonschema` takes these for annotations. It comes with install-dev.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer

from backfill.core.errors import RequestError
from backfill.core.structured import StructuredOutputsParams
from backfill.execution.grammars import GrammarCompiler

MAX_OUTPUT_BYTES = 400
VARIABLE = re.compile(r"\(#.*?\)|\"[^\"]*\"|'[^']*'|\d+(\.\d+)?")  # what makes reasons differ


class Suite:
    """What came of the schemas so far."""

    def __init__(self, num_outputs: int) -> None:
        self._num_outputs = num_outputs
        self._compiler = GrammarCompiler(Path(), 256, ())
        self._compiler._tokenizer = self._tokenizer = LLTokenizer("byte")
        self._rng = np.random.default_rng(0)
        self._weights = byte_weights(self._tokenizer)
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.narrower: list[str] = []

    def check(self, name: str, schema: Any, tests: list[dict[str, Any]]) -> None:
        self.counts["schemas"] += 1
        try:
            matcher = self._compiler.matcher(StructuredOutputsParams(json=json.dumps(schema)))
        except RequestError as error:
            self.refused[VARIABLE.sub("_", str(error))[:100]] += 1
            return
        self.counts["compiled"] += 1
        kind = validator_for(schema, jsonschema.Draft202012Validator)
        validator = jsonschema.validators.extend(kind, {"multipleOf": exact_multiple_of})(schema)
        for test in tests:
            self.counts["instances"] += 1
            texts = [text for text in spellings(test["data"]) if has(matcher, text)]
            if test["valid"] and not texts:
                self.narrower.append(f"{name}: {json.dumps(test['data'])}")
            self._validate(name, validator, [] if test["valid"] else texts)
        self._validate(name, validator, self._outputs(matcher))

    def _validate(self, name: str, validator: Any, texts: Iterator[str] | list[str]) -> None:
        for text in texts:
            self.counts["texts validated"] += 1
            try:
                is_valid = validator.is_valid(json.loads(text))
            except re.error:  # of a pattern that Python does not know
                continue
            except ValueError:  # no JSON
                is_valid = False
            if not is_valid:
                self.wrong.append(f"{name}: {text}")

    def _outputs(self, matcher: LLMatcher) -> Iterator[str]:
        for _ in range(self._num_outputs):
            following, output = matcher.deep_copy(), bytearray()
            while len(output) < MAX_OUTPUT_BYTES:
                bits = np.frombuffer(following.compute_bitmask(), dtype=np.uint8)
                if following.is_error():  # above the limits of a step: the request fails
                    self.counts["outputs given up"] += 1
                    break
                weights = self._weights * np.unpackbits(bits, bitorder="little")[: len(self._weights)]
                token_id = int(self._rng.choice(len(weights), p=weights / weights.sum()))
                if token_id == self._tokenizer.eos_token:
                    yield output.decode()
                    break
                following.consume_token(token_id)
                output.append(token_id)


def exact_multiple_of(_: Any, divisor: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """``jsonschema`` divides binary fractions, of which few are what their text says."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with localcontext(prec=800):
            if Decimal(str(value)) % Decimal(str(divisor)):
                yield jsonschema.ValidationError(f"{value} is no multiple of {divisor}")


def byte_weights(tokenizer: LLTokenizer) -> np.ndarray:
    """Of random tokens: outputs end soon, and have more syntax than text."""
    weights = np.full(tokenizer.vocab_size, 0.05)
    for texts, weight in ((b'"}],:', 6.0), (b"au01-.e", 1.0), (b"\\", 3.0), (b" \n\t\r", 0.2)):
        weights[list(texts)] = weight
    weights[tokenizer.eos_token] = 40.0
    return weights


def has(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


def spellings(value: Any) -> Iterator[str]:
    """Texts of one JSON value, the last with the first key twice."""
    compact = dumped(value)
    yield from (compact, json.dumps(value, ensure_ascii=False), json.dumps(value))
    yield from (dumped(value, key=escaped), dumped(value, string=escaped))
    yield dumped(value, number=lambda number: f"{number}.0")
    yield dumped(value, number=lambda number: f"{number}e0")
    yield re.sub(r'\{("[^"\\]*":[\w"]+)([,}])', r"{\1,\1\2", compact)


def dumped(
    value: Any,
    key: Callable[[str], str] | None = None,
    string: Callable[[str], str] | None = None,
    number: Callable[[float], str] | None = None,
) -> str:
    match value:
        case dict():
            pairs = (
                f"{(key or plain)(name)}:{dumped(each, key, string, number)}" for name, each in value.items()
            )
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(dumped(each, key, string, number) for each in value) + "]"
        case str():
            return (string or plain)(value)
        case int() | float() if not isinstance(value, bool):
            return (number or plain)(value)
    return plain(value)


def plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def escaped(text: str) -> str:
    first = "".join(f"\\u{ord(letter):04x}" for letter in text[:1] if ord(letter) < 1 << 16)
    return f'"{first}{plain(text[1:] if first else text)[1:]}'


def groups(path: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Names, schemas and tests."""
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        found = json.loads(file.read_text(encoding="utf-8"))
        draft = next((part[-1] for part in file.parts if re.fullmatch("draft[4-7]", part)), None)
        for group in found if isinstance(found, list) else [found]:
            if draft is not None and isinstance(group["schema"], dict):
                group["schema"].setdefault("$schema", f"http://json-schema.org/draft-0{draft}/schema#")
            yield f"{file.name} {group['description']}", group["schema"], group["tests"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--outputs", type=int, default=4, help="random outputs of each schema")
    arguments = parser.parse_args()
    suite = Suite(arguments.outputs)
    for path in arguments.paths:
        for name, schema, tests in groups(path):
            suite.check(name, schema, tests)
    for title, lines in (("narrower", suite.narrower), ("wrong", suite.wrong)):
        print("\n".join(f"{title}: {line[:300]}" for line in lines))
    print("\n".join(f"refused: {count:6} {reason}" for reason, count in suite.refused.most_common()))
    print(", ".join(f"{count} {name}" for name, count in suite.counts.items()))
    print(f"{suite.refused.total()} refused, {len(suite.narrower)} narrower, {len(suite.wrong)} wrong")
    sys.exit(bool(suite.wrong))


if __name__ == "__main__":
    main()
