"""Input files of batches and their results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
from openai import OpenAI
from openai.types import Batch

from tests.api.servers import MODEL, wait_until

FINAL = ("completed", "failed", "expired", "cancelled")


def chat_line(custom_id: str, content: str = "Hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


def completion_line(custom_id: str, prompt: Any = "Hi", **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}


def as_jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client: OpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, content), purpose="batch").id


def submit(client: OpenAI, content: bytes, endpoint: Any = "/v1/chat/completions", **fields: Any) -> Batch:
    window = fields.pop("completion_window", "24h")
    file_id = upload(client, content)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window=window, **fields)


def wait_ended(client: OpenAI, batch_id: str) -> Batch:
    last: list[Batch] = []

    def has_ended() -> bool:
        try:
            last[:] = [client.batches.retrieve(batch_id)]
        except openai.APIConnectionError:  # a server that is being killed and started again
            return False
        return last[0].status in FINAL

    wait_until(has_ended, f"{batch_id} to end")
    return last[0]


def result_lines(client: OpenAI, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the output file and of the error file."""
    return tuple(  # type: ignore[return-value]
        [] if file_id is None else parse_jsonl(client.files.content(file_id).read())
        for file_id in (batch.output_file_id, batch.error_file_id)
    )


def parse_jsonl(content: bytes) -> list[dict[str, Any]]:
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def check_accounts(client: OpenAI, batch: Batch, custom_ids: Iterable[str]) -> None:
    """Every input line has exactly one result line, and the counts say so."""
    output, errors = result_lines(client, batch)
    counts = batch.request_counts
    assert counts is not None
    assert sorted(line["custom_id"] for line in output + errors) == sorted(custom_ids)
    assert len({line["id"] for line in output + errors}) == counts.total
    assert (counts.completed, counts.failed) == (len(output), len(errors))
    assert counts.completed + counts.failed == counts.total
