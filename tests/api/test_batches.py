"""The Batches API through real HTTP: the official client, the small model."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.api.batch_inputs import (
    as_jsonl,
    chat_line,
    check_accounts,
    completion_line,
    result_lines,
    submit,
    upload,
    wait_ended,
)
from tests.api.servers import MODEL, TIMEOUT_S, RunningServer, ending, launch_small, small_server, wait_until
from tests.cli.running import run_cli_here

LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


def test_a_batch_from_upload_to_results(server: RunningServer, client: OpenAI) -> None:
    lines = [chat_line(f"line-{number}", f"What is {number}?") for number in range(6)]
    done = server.metric("backfill:batch_lines_total", outcome="completed")
    created = submit(client, as_jsonl(lines), metadata={"team": "search"})
    assert created.id.startswith("batch_")
    assert (created.object, created.status, created.endpoint) == (
        "batch",
        "validating",
        "/v1/chat/completions",
    )
    assert created.expires_at == created.created_at + 24 * 3600
    assert created.completion_window == "24h"
    assert (created.output_file_id, created.error_file_id, created.errors) == (None, None, None)
    assert created.completed_at is None and created.in_progress_at is None
    batch = wait_ended(client, created.id)
    assert batch.status == "completed"
    assert batch.model == MODEL
    assert batch.metadata == {"team": "search"}
    assert batch.errors is None and batch.error_file_id is None
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (6, 6, 0)
    stamps = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert stamps == sorted(stamps, key=lambda stamp: stamp or 0) and None not in stamps
    assert (batch.failed_at, batch.expired_at, batch.cancelled_at) == (None, None, None)
    output, _ = result_lines(client, batch)
    check_accounts(client, batch, [line["custom_id"] for line in lines])
    for line in output:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["id"].startswith("batch_req_")
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"]
        body = line["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["usage"]["completion_tokens"] <= 2
    usage = batch.usage
    assert usage is not None
    assert usage.output_tokens == sum(
        line["response"]["body"]["usage"]["completion_tokens"] for line in output
    )
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert batch.output_file_id is not None
    results = client.files.retrieve(batch.output_file_id)
    assert results.purpose == "batch_output"
    assert results.bytes == len(client.files.content(results.id).read())
    client.files.delete(results.id)
    assert client.batches.retrieve(batch.id).output_file_id == results.id, "also once it is deleted"
    response = server.http.post(f"/v1/batches/{batch.id}/cancel")
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
    assert server.metric("backfill:batch_lines_total", outcome="completed") == done + 6
    assert server.metric("backfill:batch_lines_queued") == 0
    assert server.logged(batch.id, "6 lines")


def test_fields_without_an_effect_are_named_in_the_batch_its_lines_and_the_log(
    server: RunningServer, client: OpenAI
) -> None:
    lines = [chat_line("a"), chat_line("b", max_tokns=3), chat_line("c", max_tokns=3)]
    body = {"input_file_id": upload(client, as_jsonl(lines)), "endpoint": "/v1/chat/completions"}
    extra = {"completion_window": "3d", "metdata": {"a": "b"}}
    created = server.http.post("/v1/batches", json={**body, **extra})
    assert created.headers["x-backfill-warning"] == "unknown fields: metdata (did you mean metadata?)"
    batch = wait_ended(client, created.json()["id"])
    assert (batch.status, batch.expires_at) == ("completed", batch.created_at + 3 * 24 * 3600)
    warning = server.logged(batch.id, "max_tokns")
    server.logged(batch.id, "3 completed")  # later lines are there too
    assert sum(batch.id in line and "max_tokns" in line for line in server.output) == 1
    assert "2 lines" in warning and "did you mean max_tokens?" in warning
    assert batch.errors is None
    told = batch.model_dump()["warning"]
    assert told.startswith("2 lines have fields with no effect, first in line 2: unknown fields: max_tokns")
    of_lines = {line["custom_id"]: line.get("warning") for line in result_lines(client, batch)[0]}
    unknown = "unknown fields: max_tokns (did you mean max_tokens?)"
    assert of_lines == {"a": None, "b": unknown, "c": unknown}


def test_answers_are_those_of_the_online_api(server: RunningServer, client: OpenAI) -> None:
    content = as_jsonl([chat_line("a", "What is gravity?", max_tokens=8), chat_line("b", "Hi", max_tokens=8)])
    output, _ = result_lines(client, wait_ended(client, submit(client, content).id))
    (line,) = [line for line in output if line["custom_id"] == "a"]
    online = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is gravity?"}], max_tokens=8, temperature=0
    )
    body = line["response"]["body"]
    assert set(body) == set(online.model_dump(exclude_unset=True))
    assert body["usage"]["prompt_tokens"] == online.usage.prompt_tokens  # type: ignore[union-attr]


def test_completions_and_their_ways_to_write_a_prompt(client: OpenAI) -> None:
    lines = [
        completion_line("text", "Hello"),
        completion_line("tokens", [5, 6, 7]),
        completion_line("several", ["a", "b"], n=2),
        completion_line("tier", service_tier="auto", priority=-5),
        completion_line("no-model", model=None),
    ]
    batch = wait_ended(client, submit(client, as_jsonl(lines), "/v1/completions").id)
    output, errors = result_lines(client, batch)
    assert not errors
    by_id = {line["custom_id"]: line["response"]["body"] for line in output}
    assert len(by_id["several"]["choices"]) == 4
    assert by_id["tokens"]["usage"]["prompt_tokens"] == 3


def test_a_line_that_is_refused_does_not_fail_its_batch(client: OpenAI) -> None:
    lines = [chat_line("good"), chat_line("long", "x " * 5000), chat_line("longest", "x " * 50_000)]
    batch = wait_ended(client, submit(client, as_jsonl(lines)).id)
    assert batch.status == "completed"
    check_accounts(client, batch, [line["custom_id"] for line in lines])
    output, errors = result_lines(client, batch)
    assert [line["custom_id"] for line in output] == ["good"]
    for line in errors:
        assert line["error"] is None, "the model refused it: the reason is in the response"
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["type"] == "invalid_request_error"
        assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_a_batch_whose_every_line_fails_has_no_output_file(client: OpenAI) -> None:
    lines = [chat_line("a", "x " * 5000), chat_line("b", "x " * 5000)]
    batch = wait_ended(client, submit(client, as_jsonl(lines)).id)
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (2, 0, 2)
    assert batch.status == "completed" and batch.output_file_id is None and batch.error_file_id is not None


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (as_jsonl([chat_line("a")]) + b"\n\xff\xfe{}\n", "invalid_json_line", 3),
        (as_jsonl([chat_line("a"), chat_line("b", "x" * 200_000)]), "invalid_value", 2),  # --max-body-bytes
        (as_jsonl([chat_line("a", max_tokens=2048)]), "context_length_exceeded", 1),
        (as_jsonl([chat_line(str(number)) for number in range(101)]), "too_many_tasks", None),
    ],
)
def test_a_bad_input_file_fails_its_batch_before_any_line_runs(
    client: OpenAI, content: bytes, code: str, line: int | None
) -> None:
    batch = wait_ended(client, submit(client, content).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None and batch.in_progress_at is None
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert batch.errors is not None and batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    assert batch.errors.data[0].message


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"input_file_id": None}, 400, "input_file_id", "missing_required_parameter"),
        ({"endpoint": None}, 400, "endpoint", "missing_required_parameter"),
        ({"completion_window": None}, 400, "completion_window", "missing_required_parameter"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint", None),
        ({"completion_window": "soon"}, 400, "completion_window", None),
        ({"completion_window": "0h"}, 400, "completion_window", None),
        ({"completion_window": "366d"}, 400, "completion_window", None),
        ({"completion_window": "9" * 400 + "h"}, 400, "completion_window", None),
        ({"completion_window": 24}, 400, "completion_window", None),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata", None),
        ({"metadata": {"k" * 65: ""}}, 400, "metadata", None),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata", None),
        ({"metadata": {"k": 5}}, 400, "metadata", None),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after", None),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400, "output_expires_after", None),
    ],
)
def test_a_bad_batch_is_refused(
    server: RunningServer,
    client: OpenAI,
    fields: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
) -> None:
    body = {
        "input_file_id": upload(client, as_jsonl([chat_line("a")])),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    response = server.http.post("/v1/batches", json={k: v for k, v in body.items() if v is not None})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_input_files_must_exist_and_be_meant_for_batches(client: OpenAI) -> None:
    notes = client.files.create(file=("notes.txt", b"x"), purpose="user_data")
    for file_id in ("file-nope", notes.id):
        with pytest.raises(openai.APIStatusError) as caught:
            client.batches.create(
                input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert caught.value.status_code in (400, 404)
        assert file_id in caught.value.message


def test_batches_are_listed_in_pages(server: RunningServer, client: OpenAI) -> None:
    ids = [submit(client, b"bad\n").id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2) if batch.id in ids] == ids[::-1]
    page = client.batches.list(limit=1, after=ids[3])
    assert [batch.id for batch in page.data] == [ids[2]]
    for query in ("limit=0", "limit=101", "limit=x"):
        assert server.http.get(f"/v1/batches?{query}").json()["error"]["param"] == "limit"
    for batch_id in ids:
        wait_ended(client, batch_id)


@pytest.mark.parametrize("batch_id", ["batch_nope", "nope", "file-x", "%2e%2e"])
def test_batches_that_do_not_exist(server: RunningServer, batch_id: str) -> None:
    assert server.http.get(f"/v1/batches/{batch_id}").status_code == 404
    assert server.http.post(f"/v1/batches/{batch_id}/cancel").status_code == 404


def test_cancelling_keeps_what_is_done_and_stops_the_rest(server: RunningServer, client: OpenAI) -> None:
    lines = [chat_line("short"), *(chat_line(f"long-{number}", **LONG) for number in range(20))]
    batch = submit(client, as_jsonl(lines))
    wait_until(lambda: num_completed(client, batch.id) == 1, "the short line")
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    # The database knows of a batch's state first.
    wait_until(lambda: server.metric("backfill:batch_jobs", status="in_progress") == 1, "the batch")
    assert server.metric("backfill:batch_lines_queued") == 20
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    assert cancelled.cancelling_at is not None
    assert client.batches.cancel(batch.id).id == batch.id, "a second cancel is no error"
    batch = wait_ended(client, batch.id)
    assert batch.status == "cancelled"
    assert client.batches.cancel(batch.id).status == "cancelled"
    check_accounts(client, batch, [line["custom_id"] for line in lines])
    output, errors = result_lines(client, batch)
    assert [line["custom_id"] for line in output] == ["short"]
    assert {(line["error"]["code"], line["response"]) for line in errors} == {("batch_cancelled", None)}
    wait_until(lambda: server.metric("backfill:num_requests_running") == 0, "the engine to be empty")
    assert client.files.delete(batch.input_file_id).deleted


def num_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


@pytest.mark.slow  # tests/router/test_batches.py asks for those of another owner, too
def test_other_keys_files_and_batches_do_not_exist(keyed_server: RunningServer) -> None:
    server = keyed_server
    mine, yours = server.client("key-of-carol"), server.client("key-of-dave")
    batch = wait_ended(mine, submit(mine, as_jsonl([chat_line("a")])).id)
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (yours.files.retrieve, yours.files.content, yours.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    for ask in (yours.batches.retrieve, yours.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.APIStatusError):
        yours.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert not yours.files.list().data and not yours.batches.list().data
    assert len(mine.files.list().data) == 2
    for path in ("/v1/files", "/v1/batches"):
        assert server.http.get(path).status_code == 401
    stored = b"".join(path.read_bytes() for path in server.data_dir.rglob("*") if path.is_file())
    assert b"key-of-carol" not in stored, "keys are not stored"


def test_a_second_server_on_the_data_folder_is_refused(server: RunningServer) -> None:
    config = (server.data_dir / "config.json").read_text()
    second = run_cli_here("serve", "--port", "0", "--data-dir", str(server.data_dir))
    assert second.returncode == 1
    assert str(server.process.pid) in second.stderr
    assert server.url in second.stderr
    assert second.stderr.count("\n") == 1
    assert (server.data_dir / "config.json").read_text() == config
    assert server.http.get("/health").status_code == 200


NUM_LINES = 30
# Two lines at a time with many steps each, so that the batch takes long.
OPTIONS = ("--max-num-seqs", "2")


@pytest.mark.slow  # tests/cli/test_run_batch.py and tests/jobs kill as well
def test_a_batch_sent_while_the_model_loads_outlives_its_engine_a_shutdown_and_a_killed_server(
    small_model: Path, tmp_path: Path
) -> None:
    custom_ids = [f"line-{number}" for number in range(NUM_LINES)]
    content = as_jsonl(
        completion_line(custom_id, [5, 6, 7 + number], max_tokens=80, ignore_eos=True)
        for number, custom_id in enumerate(custom_ids)
    )
    with ending(launch_small(small_model, *OPTIONS, data_dir=tmp_path)) as server:
        batch_id = submit_while_it_loads(server, content).id
        wait_at_work(server, batch_id)
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_at_work(server, batch_id)
        with server.paused_engine():
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.http.get("/health").status_code == 503, "draining")
        assert server.process.wait(TIMEOUT_S) == 0
    results = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert 0 < results.count(b'"id":"batch_req_') < NUM_LINES, "offline lines are not waited for"
    with small_server(small_model, *OPTIONS, data_dir=tmp_path) as server:
        wait_at_work(server, batch_id)
    with small_server(small_model, *OPTIONS, data_dir=tmp_path) as server:
        batch = wait_ended(server.client(), batch_id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.failed) == (NUM_LINES, 0)
        check_accounts(server.client(), batch, custom_ids)


def submit_while_it_loads(server: RunningServer, content: bytes) -> Batch:
    submitted: list[Batch] = []

    def is_submitted() -> bool:
        with suppress(openai.APIConnectionError, httpx.TransportError):
            submitted.append(submit(server.client(), content, "/v1/completions"))
        return bool(submitted)

    wait_until(is_submitted, "the server to listen")
    return submitted[0]


def wait_at_work(server: RunningServer, batch_id: str) -> None:
    """Until two more lines have ended; others have not."""
    least = num_ended(server, batch_id) + 2
    wait_until(lambda: num_ended(server, batch_id) >= least, f"{least} lines")
    assert num_ended(server, batch_id) < NUM_LINES, "every death must hit the batch at work"


def num_ended(server: RunningServer, batch_id: str) -> int:
    assert server.process.poll() is None, "".join(server.output)
    counts = server.http.get(f"/v1/batches/{batch_id}").json()["request_counts"]
    return int(counts["completed"] + counts["failed"])
