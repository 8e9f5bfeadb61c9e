"""Random JSON schemas of what llguidance implements."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "age", "city", "tags", "price", "notes", "kind", "value", "état", "a b")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Outputs of most of them are short even of a model that draws tokens at random."""
    if depth == 0 or rng.random() < 0.4:
        return _scalar(rng)
    match rng.choice(["object", "array", "anyOf", "tuple", "ref"]):
        case "object":
            return _object(rng, depth - 1)
        case "array":
            fewest = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "tuple":
            first = [random_schema(rng, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
        case _ if depth < 3:  # a reference is to the whole schema's
            return _scalar(rng)
        case _:
            properties = {name: {"$ref": "#/$defs/shared"} for name in ("first", "second")}
            inner = {"type": "object", "properties": properties, "required": ["first", "second"]}
            return {**inner, "additionalProperties": False, "$defs": {"shared": random_schema(rng, 1)}}


def _scalar(rng: random.Random) -> dict[str, Any]:
    match rng.choice(["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]):
        case "string":
            shortest = rng.randint(0, 4)
            return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 12)}
        case "integer":
            least = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 500)}
        case "number":
            least = rng.uniform(-10, 10)
            return {"type": "number", "exclusiveMinimum": least, "maximum": least + rng.uniform(0.5, 5)}
        case "enum":
            return {"enum": rng.sample([1, -2.5, "x", "é\n", None, True, {"a": [1]}, [], 'q"'], 3)}
        case "const":
            return {"const": rng.choice([0, "fixed", {"k": "v"}, [1, 2]])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,6}$", "^(ab|c)+d{1,3}$", "^[0-9]+$"])}
        case kind:
            return {"type": kind}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    return schema
