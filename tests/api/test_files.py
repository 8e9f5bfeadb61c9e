"""The Files API through real HTTP: the official client, and invalid requests."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from backfill.jobs.config import JobsConfig
from backfill.jobs.manager import JobManager
from tests.api.batch_inputs import as_jsonl, chat_line, upload
from tests.api.in_process import unstarted_app
from tests.api.servers import RunningServer, wait_until
from tests.jobs.doubles import InThreadReader

CONTENT = as_jsonl([chat_line("a"), chat_line("b", "größer")])
FORM = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", CONTENT)}}


def post(server: RunningServer, **request: Any) -> httpx.Response:
    return server.http.post("/v1/files", **request)


def assert_refused(response: httpx.Response, status: int, param: str | None, part: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert part in error["message"]


def test_a_file_from_upload_to_deletion(client: OpenAI) -> None:
    before = int(time.time())
    file = client.files.create(file=("in.jsonl", CONTENT), purpose="batch")
    assert file.id.startswith("file-")
    assert (file.object, file.bytes, file.filename, file.purpose) == (
        "file",
        len(CONTENT),
        "in.jsonl",
        "batch",
    )
    assert file.status == "processed"
    assert before <= file.created_at <= time.time()
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == CONTENT
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert file.id in caught.value.message


@pytest.mark.anyio
async def test_what_prepares_lines_starts_with_the_upload_of_a_batch(tmp_path: Path) -> None:
    """It takes seconds, in which the file comes and its batch is created."""
    launches: list[str] = []
    jobs = JobManager(
        JobsConfig(data_dir=tmp_path),
        InThreadReader(),
        model_names=["m"],
        on_batch_upload=lambda: launches.append("files"),
    )
    await jobs.start()
    transport = httpx.ASGITransport(unstarted_app(jobs=jobs))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for purpose, expected in (("user_data", []), ("batch", ["files"])):
            answer = await client.post("/v1/files", **{**FORM, "data": {"purpose": purpose}})
            assert answer.status_code == 200, answer.text
            assert launches == expected
    await jobs.stop()


def test_files_are_listed_in_pages(client: OpenAI) -> None:
    ids = [upload(client, b"%d" % number) for number in range(5)]
    other = client.files.create(file=("notes.txt", b"x"), purpose="user_data")
    assert [file.id for file in client.files.list(limit=2) if file.id in ids] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc") if file.id in ids] == ids
    page = client.files.list(purpose="user_data")
    assert page.data[0].id == other.id
    assert {file.purpose for file in page.data} == {"user_data"}
    assert not page.has_more
    assert client.files.list(after=ids[3], limit=1).data[0].id == ids[2]
    assert other.expires_at is None, "only batch files expire by themselves"


def test_a_file_needs_no_name_and_may_have_its_own_expiry(server: RunningServer, client: OpenAI) -> None:
    file = client.files.create(
        file=CONTENT, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.expires_at) == ("upload", file.created_at + 3600)
    assert client.files.create(file=("in.jsonl", b""), purpose="batch").bytes == 0
    purpose_last = [("file", ("in.jsonl", CONTENT)), ("purpose", (None, "batch"))]
    assert post(server, files=purpose_last).json()["bytes"] == len(CONTENT)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../../etc/in.jsonl", "in.jsonl"),
        ("/etc/in.jsonl", "in.jsonl"),
        ("C:\\work\\in.jsonl", "in.jsonl"),
        ("größer.jsonl", "größer.jsonl"),
        ("a b;c.jsonl", "a b;c.jsonl"),
        ("IN.JSONL", "IN.JSONL"),
    ],
)
def test_names_are_shown_and_never_become_paths(client: OpenAI, name: str, shown: str) -> None:
    assert client.files.create(file=(name, CONTENT), purpose="batch").filename == shown


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl.gz", "..", "x" * 300 + ".jsonl"])
def test_invalid_names_of_batch_files(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=(name, CONTENT), purpose="batch")
    assert caught.value.param == "file"


@pytest.mark.parametrize(
    ("request_parts", "param", "part"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, "file", "'file'"),
        ({"files": {"purpose": (None, "batch")}}, "file", "Missing required parameter: 'file'"),
        ({"files": {"file": ("in.jsonl", b"x")}}, "purpose", "Missing required parameter: 'purpose'"),
        ({**FORM, "data": {"purpose": "fun"}}, "purpose", "got 'fun'"),
        ({**FORM, "data": {"purpose": "batch_output"}}, "purpose", "got 'batch_output'"),
        ({**FORM, "data": {"purpose": "x" * 5000}}, "purpose", "over 4096 bytes"),
        ({**FORM, "files": [("file", ("a.jsonl", b"x"))] * 2}, "file", "one file"),
        ({"data": FORM["data"], "files": {"file": ("a.txt", b"x")}}, "file", "Must be .jsonl"),
        ({"json": {"purpose": "batch"}}, None, "Content-Type"),
        ({}, None, "Content-Type"),
    ],
)
def test_a_bad_form_is_refused(
    server: RunningServer, request_parts: dict[str, Any], param: str | None, part: str
) -> None:
    assert_refused(post(server, **request_parts), 400, param, part)


@pytest.mark.parametrize(
    "expiry",
    [
        {"anchor": "created_at", "seconds": "3599"},
        {"anchor": "created_at", "seconds": "2592001"},
        {"anchor": "created_at", "seconds": "soon"},
        {"anchor": "last_active_at", "seconds": "3600"},
        {"anchor": "created_at"},
        {"seconds": "3600"},
    ],
)
def test_expiry_out_of_range_is_refused(server: RunningServer, expiry: dict[str, str]) -> None:
    fields = {f"expires_after[{key}]": value for key, value in expiry.items()}
    response = post(server, data={"purpose": "batch", **fields}, files=FORM["files"])
    assert_refused(response, 400, "expires_after", "expires_after")


@pytest.mark.parametrize("value", ["3600", '{"anchor": "created_at", "seconds": 3600}'])
def test_an_expiry_in_one_field_is_refused(server: RunningServer, value: str) -> None:
    response = post(server, data={"purpose": "batch", "expires_after": value}, files=FORM["files"])
    assert_refused(response, 400, "expires_after", "expires_after[seconds]")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=-1", "limit"),
        ("limit=many", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("order=up", "order"),
        ("purpose=bogus", "purpose"),
    ],
)
def test_a_bad_query_is_refused(server: RunningServer, query: str, param: str) -> None:
    assert_refused(server.http.get(f"/v1/files?{query}"), 400, param, param)


@pytest.mark.parametrize(
    "file_id", ["file-nope", "nope", "..", "%2e%2e%2fserver.lock", "file-%00", "x" * 3000]
)
def test_ids_that_do_not_exist(server: RunningServer, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        response = server.http.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_file_without_its_bytes_is_404(server: RunningServer, client: OpenAI) -> None:
    file_id = upload(client, CONTENT)
    (server.data_dir / "files" / file_id).unlink()
    num_logged = len(server.output)
    with httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=1)) as http:
        ports = set()
        for _ in range(2):
            response = http.get(f"/v1/files/{file_id}/content")
            assert_refused(response, 404, None, file_id)
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1, "the connection is kept"

    def logged() -> list[str]:
        """Other lines may come in between: statistics, batches of other tests."""
        return [line for line in server.output[num_logged:] if file_id in line]

    wait_until(lambda: len(logged()) >= 2, "two lines in the log")  # a thread reads them
    assert len(logged()) == 2 and all("ERROR" in line and "missing" in line for line in logged())
    assert "Traceback" not in "".join(server.output[num_logged:])
    client.files.delete(file_id)


def test_files_over_the_limit_are_refused_and_leave_nothing(server: RunningServer, client: OpenAI) -> None:
    def stored() -> set[Path]:
        return {path for path in (server.data_dir / "files").rglob("*") if path.is_file()}

    before = stored()
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("in.jsonl", b"x" * 1_000_001), purpose="batch")
    assert caught.value.status_code == 413
    parts = [("file", ("in.jsonl", b"x" * 1_000_001)), ("purpose", (None, "batch"))]
    assert_refused(post(server, files=parts), 413, None, "1000000")
    with socket.create_connection(("127.0.0.1", server.http.base_url.port or 80)) as boaster:
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        )
        boaster.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in boaster.recv(1000)
    assert stored() == before


def test_a_client_that_leaves_within_its_upload_leaves_nothing(server: RunningServer) -> None:
    folder = server.data_dir / "files"
    before = set(folder.rglob("*"))
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    part = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    with socket.create_connection(("127.0.0.1", server.http.base_url.port or 80)) as leaver:
        leaver.sendall(f"{head}Content-Length: 5000000\r\n\r\n{part}".encode() + b"x" * 2_000_000)
        wait_until(lambda: set(folder.rglob("*")) != before, "the upload to begin")
    wait_until(lambda: set(folder.rglob("*")) == before, "the upload to be forgotten")
    assert "Traceback" not in "".join(server.output)
