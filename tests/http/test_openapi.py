from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import jsonschema
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from backfill.core.errors import RequestError
from backfill.http.app import INSTEAD_OF_OLLAMA, UNSUPPORTED
from backfill.http.keys import ApiKeys
from backfill.http.openapi import docs_page
from backfill.http.page import PAGE_PATHS
from backfill.jobs.config import JobsConfig
from backfill.jobs.manager import JobManager
from backfill.preparation.client import PreparationClient
from backfill.protocol.chat import TokenizeRequest
from tests.api.in_process import unstarted_app

ERROR = {"$ref": "#/components/schemas/Error"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    config, preparation = JobsConfig(data_dir=tmp_path_factory.mktemp("data")), cast(PreparationClient, None)
    return unstarted_app(jobs=JobManager(config, preparation, model_names=("m",), url=""))


def test_a_browser_reads_the_docs_without_a_key() -> None:
    client = TestClient(unstarted_app(ApiKeys(["key"])), base_url="http://localhost")
    for path, status in (("/docs", 200), ("/openapi.json", 200), ("/v1/models", 401), ("/load", 401)):
        assert client.get(path).status_code == status


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    assert app.openapi() == app.openapi()
    return app.openapi()


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


def test_every_reference_has_a_target(document: dict[str, Any]) -> None:
    references = [item["$ref"] for item in walk(document) if isinstance(item.get("$ref"), str)]
    for name in ("TextPart", "ChatMessage", "StreamOptions", "ExpiresAfter", "SloFields", "Error"):
        assert f"#/components/schemas/{name}" in references
    for reference in references:
        target: Any = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
        assert isinstance(target, dict)


def test_every_route_declares_openais_errors(document: dict[str, Any]) -> None:
    operations = [each for item in document["paths"].values() for each in item.values()]
    assert len(operations) > 20
    for operation in operations:
        assert {"4XX", "5XX"} <= operation["responses"].keys()
        assert "422" not in operation["responses"], "no route returns it"
        for status in ("4XX", "5XX"):
            content = operation["responses"][status]["content"]
            assert content["application/json"]["schema"] == ERROR
    error = document["components"]["schemas"]["ErrorDetail"]
    assert error["required"] == ["message", "type", "param", "code"]


@pytest.mark.parametrize(
    ("path", "method", "taken", "answered"),
    [
        ("/v1/chat/completions", "post", "application/json", {"application/json", "text/event-stream"}),
        ("/v1/completions", "post", "application/json", {"application/json", "text/event-stream"}),
        ("/v1/files", "post", "multipart/form-data", {"application/json"}),
        ("/v1/files/{file_id}/content", "get", None, {"application/octet-stream"}),
        ("/v1/batches", "post", "application/json", {"application/json"}),
        ("/v1/batches/{batch_id}/cancel", "post", None, {"application/json"}),
        ("/metrics", "get", None, {"text/plain"}),
    ],
)
def test_content_types_are_those_of_the_routes(
    document: dict[str, Any], path: str, method: str, taken: str | None, answered: set[str]
) -> None:
    operation = document["paths"][path][method]
    body = operation.get("requestBody", {"content": {}})
    assert set(body["content"]) == ({taken} if taken else set())
    content = operation["responses"]["200"]["content"]
    assert set(content) == answered
    assert content.get("text/event-stream", {"schema": {}}) == {"schema": {}}, "neither text nor an object"


def test_the_docs_page_has_every_endpoint_and_loads_nothing(app: FastAPI) -> None:
    client = TestClient(app, base_url="http://localhost")
    page = client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"<script|<link|<img|src=|url\(|https?:", page.text)
    for path in app.openapi()["paths"]:
        assert f" {path}</code>" in page.text
    for shown in ("max_completion_tokens", "<h2>ChatMessage</h2>", "required"):
        assert shown in page.text
    assert client.get("/redoc").status_code == 404


def test_every_route_is_documented_or_unsupported(app: FastAPI, document: dict[str, Any]) -> None:
    documented = {
        (path, method.upper()) for path, operations in document["paths"].items() for method in operations
    }
    # FastAPI keeps an included router as one entry.
    routes = {
        (re.sub(r":path\}", "}", route.path), method)
        for entry in app.routes
        for route in getattr(getattr(entry, "original_router", None), "routes", [entry])
        for method in (route.methods or set()) - {"HEAD"}
    }
    others = {path for path, _ in routes - documented}
    unsupported = {f"/v1/{name}{rest}" for name in UNSUPPORTED for rest in ("", "/{rest}")}
    unsupported |= {f"/api/{name}" for name in INSTEAD_OF_OLLAMA}
    assert documented < routes
    assert others == {"/docs", "/openapi.json"} | PAGE_PATHS | unsupported
    for operations in document["paths"].values():
        for operation in operations.values():
            assert re.fullmatch(r"[\dA-Z].*[^.]\.", operation["description"])


def test_what_a_schema_says_is_text_on_the_docs_page() -> None:
    field = {"enum": ["<b>"], "default": "<i>"}
    schema = {"description": "<u>", "properties": {"<a>": field}}
    document = {
        "info": {"title": "<t>", "version": "1"},
        "paths": {},
        "components": {"schemas": {"<s>": schema}},
    }
    page = docs_page(document)
    for harm in ("<b>", "<i>", "<u>", "<a>", "<t>", "<s>"):
        assert harm not in page
        assert harm.replace("<", "&lt;").replace(">", "&gt;") in page


def test_a_405_lists_the_allowed_methods(app: FastAPI) -> None:
    client = TestClient(app, base_url="http://localhost")
    for path, allowed in (("/v1/files/file-x", "DELETE, GET"), ("/v1/batches", "GET, POST")):
        wrong = client.put(path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)


def test_the_document_says_what_values_may_be(document: dict[str, Any]) -> None:
    def body(path: str) -> dict[str, Any]:
        (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
        return cast(dict[str, Any], content["schema"])

    def allows(path: str, **fields: Any) -> bool:
        whole = {**body(path), "components": document["components"]}
        return jsonschema.Draft202012Validator(whole).is_valid(fields)

    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for fields in ({}, {"temperature": 2, "top_k": -1, "seed": -1, "n": 128}, {"temperature": None}):
        assert allows("/v1/chat/completions", **chat, **fields)
    for name, value in (
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("messages", []),
    ):
        assert not allows("/v1/chat/completions", **{**chat, name: value})
    assert not allows("/v1/chat/completions", messages=[{"role": "user"}])
    assert allows("/v1/chat/completions", messages=[{"role": "assistant"}])
    assert allows("/v1/completions", prompt="x", max_tokens=0) and not allows("/v1/completions", prompt="")
    assert (
        allows("/tokenize", prompt="x") and not allows("/tokenize") and not allows("/tokenize", prompt=None)
    )
    assert not allows("/tokenize", messages=[])
    with pytest.raises(RequestError, match="at least one"):
        TokenizeRequest(messages=[]).check()
    window = body("/v1/batches")["properties"]["completion_window"]["pattern"]
    assert [bool(re.search(window, text)) for text in ("24h", "365d", "0h", "", "1w")] == [
        True,
        True,
        *[False] * 3,
    ]
    upload = {"file": "", "purpose": "batch"}
    assert allows("/v1/files", **upload) and not allows("/v1/files", file="", purpose="b")
    assert not allows("/v1/files", **upload, **{"expires_after[seconds]": 3600})
