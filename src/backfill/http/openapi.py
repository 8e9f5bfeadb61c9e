"""The OpenAPI document with the bodies and errors of each route, and ``/docs``, its page.

The page loads no other file, so it needs no network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from backfill.protocol.responses import Json

# The page has no script and loads no file.
DOCS_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_CODE = re.compile("``(.+?)``")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code{font-family:ui-monospace,monospace;background:#f3f3f3;padding:0 .25em}"
    "h2{margin-top:2rem;border-top:1px solid #ddd;padding-top:1rem;font-size:1.1rem}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}"
    "th{border-bottom:1px solid #ddd}"
)

_REFERENCE = "#/components/schemas/{model}"
_ERROR_REFERENCE = {"$ref": _REFERENCE.format(model="Error")}
_FIELD = {"anyOf": [{"type": "string"}, {"type": "null"}]}

ERROR_SCHEMA: Json = {
    "type": "object",
    "title": "Error",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _FIELD,
                "code": _FIELD,
            },
        }
    },
}

_OBJECT: Json = {"type": "object"}
UPLOAD_SCHEMA: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
}


def takes_json(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's ``openapi_extra`` for a JSON body that the route parses itself."""
    return _takes("application/json", kind.model_json_schema(ref_template=_REFERENCE))


def takes_upload() -> dict[str, Any]:
    return _takes("multipart/form-data", UPLOAD_SCHEMA)


def answers(*content_types: str) -> dict[int | str, dict[str, Any]]:
    """A route's ``responses``: the content types that it may return with status 200."""
    schemas: dict[str, Json] = {
        "application/json": _OBJECT,
        "application/octet-stream": {"type": "string", "format": "binary"},
    }
    content = {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in content_types}
    return {200: {"description": "Success", "content": content}}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The application's document, made once. Every reference in it has a target."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas: dict[str, Any] = {"Error": ERROR_SCHEMA}
        for operations in document["paths"].values():
            for operation in operations.values():
                _complete(operation, schemas)
        document["components"] = {"schemas": schemas}
        app.openapi_schema = document
    return app.openapi_schema


def _takes(content_type: str, schema: Json) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


def _complete(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move the definitions inside a body's schema to ``schemas``, and add the errors of every route."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        # FastAPI returns the route's own dictionary: change a copy.
        content["schema"] = dict(content["schema"])
        schemas.update(content["schema"].pop("$defs", {}))
    operation["responses"].pop("422", None)  # FastAPI adds it; this server answers 400 for invalid values
    for status, description in (
        ("4XX", "The request cannot be served."),
        ("5XX", "The server failed."),
    ):
        content = {"application/json": {"schema": _ERROR_REFERENCE}}
        operation["responses"][status] = {"description": description, "content": content}


def docs_page(document: Json) -> str:
    """The HTML page of an OpenAPI document: endpoints with the fields of their bodies, then schemas."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        '<p>This page for programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation)
    for name, schema in document["components"]["schemas"].items():
        parts += [f'<h2 id="{_anchor(name)}">{escape(name)}</h2>', *_fields(schema)]
    return "".join([*parts, "</body></html>"])


def _operation(path: str, method: str, operation: Json) -> Iterable[str]:
    yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation['description'])}</p>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Takes <code>{escape(kind)}</code>:</p>"
        yield from _fields(content["schema"])
    answers = [
        f"{escape(status)} <code>{escape(kind)}</code>"
        for status, response in operation["responses"].items()
        for kind in response.get("content", {})
    ]
    if answers:
        yield f"<p>Answers {', '.join(answers)}</p>"


def _fields(schema: Json) -> Iterable[str]:
    """The description of an object and a table of its fields, where it has any."""
    if schema.get("description"):
        text = _CODE.sub(r"<code>\1</code>", escape(schema["description"]))
        yield f"<p>{text}</p>"
    properties: Mapping[str, Json] = schema.get("properties", {})
    if not properties:
        return
    required = schema.get("required", ())
    yield "<table><tr><th>field</th><th>type</th><th>default</th></tr>"
    for name, field in properties.items():
        default = "required" if name in required else _default(field)
        yield f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td><td>{default}</td></tr>"
    yield "</table>"


def _type(schema: Any) -> str:
    """A field's type in words, as HTML."""
    if not isinstance(schema, dict):
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{_anchor(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items'))}"
    return escape(str(schema.get("type", "any")))


def _default(schema: Json) -> str:
    default = schema.get("default")
    return "" if default is None else f"<code>{escape(json.dumps(default))}</code>"


def _anchor(name: str) -> str:
    return escape(f"object-{name}", quote=True)
