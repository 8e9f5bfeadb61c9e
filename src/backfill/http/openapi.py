"""The OpenAPI document with the bodies and errors of each route, and ``/docs``, its page.

The page loads no other file, so it needs no network.
"""

from __future__ import annotations

import functools
import json
import math
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from backfill.core.options import Bounds, options_of
from backfill.core.sampling import SamplingParams
from backfill.protocol.batches import MAX_EXPIRY_S, MIN_EXPIRY_S, UPLOAD_PURPOSES
from backfill.protocol.shapes import Json

# The page has no script and loads no file.
DOCS_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code{font-family:ui-monospace,monospace;background:#f3f3f3;padding:0 .25em}"
    "h2{margin-top:2rem;border-top:1px solid #ddd;padding-top:1rem;font-size:1.1rem}"
    "pre{background:#f3f3f3;padding:.5em;overflow-x:auto}"
)

_REFERENCE = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


# Of every route. FastAPI adds a 422 where 4XX is missing; this server answers 400 for invalid values.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request cannot be served."},
    "5XX": {"model": Error, "description": "The server failed."},
}
UPLOAD_SCHEMA: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(UPLOAD_PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
}


@functools.cache
def takes_json(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's ``openapi_extra`` for a JSON body that the route parses itself."""
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    for name, option in options_of(SamplingParams).items():
        for form in schema["properties"].get(name, {}).get("anyOf", ()):
            if option.bounds is not None and form.get("type") in ("integer", "number"):
                form.update(_bounded(option.bounds) | form)  # the field's own come first
    return _takes("application/json", schema)


def _bounded(bounds: Bounds) -> Json:
    limits = {
        "minimum": bounds.least,
        "exclusiveMinimum": bounds.above,
        "maximum": bounds.most,
        "exclusiveMaximum": bounds.below,
    }
    return {name: limit for name, limit in limits.items() if math.isfinite(limit)}


def takes_upload() -> dict[str, Any]:
    return _takes("multipart/form-data", UPLOAD_SCHEMA)


def answers(*content_types: str) -> dict[int | str, dict[str, Any]]:
    """A route's ``responses``: the content types that it may return with status 200."""
    schemas: dict[str, Json] = {
        "application/json": {"type": "object"},
        "application/octet-stream": {"type": "string", "format": "binary"},
        "text/event-stream": {},  # some programs take it for an event's, which is an object, and some for all
    }
    content = {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in content_types}
    return {200: {"description": "Success", "content": content}}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The application's document, made once. Every reference in it has a target."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, routes=app.routes, servers=app.servers or None
        )
        for operations in document["paths"].values():
            for operation in operations.values():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    # FastAPI returns the route's own dictionary: change a copy.
                    content["schema"] = dict(content["schema"])
                    document["components"]["schemas"].update(content["schema"].pop("$defs", {}))
        app.openapi_schema = document
    return app.openapi_schema


def _takes(content_type: str, schema: Json) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


def docs_page(document: Json) -> str:
    """The HTML page of an OpenAPI document: each endpoint and each schema, as it has them."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        '<p>This page for programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation['description'])}</p>")
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                parts.append(f"<p>Takes <code>{escape(kind)}</code>:</p>{_shown(content['schema'])}")
            answers = [
                f"{escape(status)} <code>{escape(kind)}</code>"
                for status, response in operation["responses"].items()
                for kind in response.get("content", {})
            ]
            parts.append(f"<p>Answers {', '.join(answers)}</p>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h2>{escape(name)}</h2>{_shown(schema)}")
    return "".join([*parts, "</body></html>"])


def _shown(schema: Json) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"
