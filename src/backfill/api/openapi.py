"""The OpenAPI document: request bodies, responses and errors of each route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from backfill.protocol.responses import Json

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
