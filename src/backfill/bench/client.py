"""A streaming client that times every chunk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Self

import aiohttp
import msgspec

from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.core.errors import ConfigError
from backfill.http.errors import tls_hint, why_not_connected

_DONE = b"[DONE]"
# uvicorn closes idle connections after 5 s. A request sent on a closing connection would fail.
_KEEP_ALIVE_S = 4.0
_CALL_TIMEOUT_S = 60.0


class StreamError(Exception):
    """The response does not count as completed; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server's address, and the fields and headers of every request.

    Attributes:
        base_url: scheme, host and port, without ``/v1``.
        path: such as ``/v1/completions``.
        model: name of the model at the server; empty for the server's first.
        is_streaming: if False, the response comes whole and counts as one chunk.
        body: fields of every request. They replace the client's own.
        timeout_s: limit of one request, from send to end.
    """

    base_url: str
    path: str
    model: str
    is_streaming: bool = True
    ignore_eos: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 6 * 3600.0
    verifies_tls: bool = True


def parse_base_url(text: str) -> str:
    """Scheme, host and port of a URL that may end in ``/v1``. Raises: ConfigError."""
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"`base_url` must begin with http:// or https://, got {text!r}.")
    return text.rstrip("/").removesuffix("/v1")


def authorization() -> dict[str, str]:
    """The header that carries OPENAI_API_KEY; empty if that is not set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class ServerApi:
    """Calls of a server beside completions. Use as an async context manager.

    Args:
        timeout_s: limit of one call.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._endpoint.headers,
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=self._endpoint.verifies_tls
            ),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def get_text(self, path: str) -> str | None:
        """The body of a response with status 200; None for another status.

        Raises: aiohttp.ClientError or TimeoutError when the server does not answer.
        """
        async with self._session.get(self._endpoint.base_url + path) as response:
            body = await response.read()
            return body.decode(errors="replace") if response.status == 200 else None

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a JSON body or a form, and return the JSON object of the response.

        Raises: StreamError for a refusal or a response of another shape; aiohttp.ClientError, TimeoutError.
        """
        payload = {"data": body} if isinstance(body, aiohttp.FormData) else {"json": body}
        url = self._endpoint.base_url + path
        async with self._session.request(method, url, **payload) as response:
            content = await response.read()
            if response.status != 200:
                raise StreamError(_refusal(response.status, content))
        try:
            answer = msgspec.json.decode(content)
        except ValueError as error:
            raise StreamError(f"{path} did not answer with JSON") from error
        if not isinstance(answer, dict):
            raise StreamError(f"{path} did not answer with a JSON object")
        return answer


class BenchClient(ServerApi):
    """Sends requests to one endpoint. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, endpoint.timeout_s)

    async def send(self, request: BenchRequest, record: RequestRecord, run_started_at: float) -> None:
        """Send one request and fill in its record, which also keeps every failure of server or network.

        Args:
            run_started_at: ``time.perf_counter()`` at the start of the run.
        Raises: CancelledError only. The record is then interrupted and keeps the chunks that arrived.
        """
        body = msgspec.json.encode(request_body(self._endpoint, request))
        sent_at = time.perf_counter()
        record.sent_at_s = sent_at - run_started_at
        try:
            await self._receive(body, record, sent_at)
            record.outcome = Outcome.COMPLETED
        except asyncio.CancelledError:
            record.outcome, record.error = Outcome.INTERRUPTED, "interrupted"
            raise
        except TimeoutError:
            record.outcome = Outcome.FAILED
            record.error = f"no end of the response within {self._endpoint.timeout_s:g} s"
        except (StreamError, aiohttp.ClientError, OSError, ValueError) as error:
            record.outcome, record.error = Outcome.FAILED, describe(error)
        finally:
            record.ended_after_s = time.perf_counter() - sent_at
            record.output_tokens = record.output_tokens or len(record.chunk_after_s)

    async def get_models(self) -> list[dict[str, Any]]:
        """The entries of ``GET /v1/models``; empty when the response is not a list of models.

        Raises: ConfigError when no server answers at the URL.
        """
        url = f"{self._endpoint.base_url}/v1/models"
        try:
            async with self._session.get(url) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientConnectionError, aiohttp.InvalidURL, TimeoutError) as error:
            base_url = self._endpoint.base_url
            hint = tls_hint(base_url) if isinstance(error, aiohttp.ServerDisconnectedError) else ""
            raise ConfigError(f"No server answers at {base_url}: {describe(error)}{hint}.") from error
        except (aiohttp.ClientError, ValueError):
            return []
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            return []
        return [entry for entry in entries if isinstance(entry, dict) and "id" in entry]

    async def _receive(self, body: bytes, record: RequestRecord, sent_at: float) -> None:
        decoder, reader = SseDecoder(), _ChunkReader(record)
        url = self._endpoint.base_url + self._endpoint.path
        headers = {"Content-Type": "application/json", **self._endpoint.headers}
        async with self._session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                raise StreamError(_refusal(response.status, await response.read()))
            if not self._endpoint.is_streaming:
                reader.read(await response.read(), time.perf_counter() - sent_at)
            else:
                async for received in response.content.iter_any():
                    after_s = time.perf_counter() - sent_at
                    for event in decoder.feed(received):
                        reader.read(event, after_s)
                for event in decoder.finish():
                    reader.read(event, time.perf_counter() - sent_at)
        reader.check_complete()


def request_body(endpoint: Endpoint, request: BenchRequest) -> dict[str, Any]:
    """The JSON body that asks the endpoint for an output."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
    }
    if endpoint.is_streaming:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if endpoint.ignore_eos:
        body["ignore_eos"] = True
    return {**body, **endpoint.body}


class ServerModel(NamedTuple):
    """A model as ``/v1/models`` describes it; None where the server does not say."""

    name: str
    max_model_len: int | None


async def find_model(endpoint: Endpoint) -> ServerModel:
    """The endpoint's model, or the server's first if it names none.

    Raises: ConfigError when no server answers, or neither names a model.
    """
    async with BenchClient(endpoint) as client:
        entries = await client.get_models()
    named = [entry for entry in entries if entry["id"] == endpoint.model]
    entry = next(iter(named or entries), {})
    name = endpoint.model or str(entry.get("id", ""))
    if not name:
        raise ConfigError(f"{endpoint.base_url}/v1/models names no model; give `model`.")
    limit = entry.get("max_model_len")
    return ServerModel(name, limit if isinstance(limit, int) else None)


class SseDecoder:
    """Collects bytes until events are complete. A read may hold several events or a part of one.

    Source: the WHATWG HTML standard, section 9.2.6. Lines end in LF or CRLF, an empty line ends an event,
    several ``data`` lines are joined by LF, and comments and other fields are skipped. A lone CR does not end
    a line here; no server sends it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that these bytes complete."""
        # Bytes are split, not text, since a read may end within a UTF-8 character.
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if not stripped:
                events += self._end_event()
            elif stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))
        return events

    def finish(self) -> list[bytes]:
        """The events that the end of the stream completes: some servers leave out the last empty line."""
        return self.feed(b"\n\n")

    def _end_event(self) -> list[bytes]:
        if not self._data:
            return []
        event = b"\n".join(self._data)
        self._data.clear()
        return [event]


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Usage(msgspec.Struct):
    completion_tokens: _Count | None = None
    prompt_tokens: _Count | None = None


class _Chunk(msgspec.Struct):
    """The fields of an event that the client reads."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class _ChunkReader:
    """Adds the events of one response to its record."""

    record: RequestRecord
    is_ended: bool = False

    def read(self, event: bytes, after_s: float) -> None:
        """Add one event. On an error the record is unchanged.

        Raises: StreamError for an error that the server sent or an event of another shape; ValueError for
            bytes that are not JSON.
        """
        if event == _DONE:
            self.is_ended = True
            return
        try:
            chunk = _decoder.decode(event)
        except (msgspec.ValidationError, RecursionError) as error:
            raise StreamError(f"unexpected event: {error}") from error
        if chunk.error:
            raise StreamError(f"error in the stream: {_message({'error': chunk.error})}")
        if chunk.choices:
            self.record.chunk_after_s.append(after_s)
            self.is_ended |= chunk.choices[0].finish_reason is not None
        if chunk.usage:
            self.record.output_tokens = chunk.usage.completion_tokens or self.record.output_tokens
            self.record.input_tokens = chunk.usage.prompt_tokens or self.record.input_tokens

    def check_complete(self) -> None:
        """Raises: StreamError when the response ended without a chunk or without an end marker."""
        if not self.record.chunk_after_s:
            raise StreamError("the response ended without a chunk")
        if not self.is_ended:
            raise StreamError("the response broke off before its end")


def describe(error: BaseException) -> str:
    """The error in one line; its class's name if it has no message."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke off within the response"
    if isinstance(error, aiohttp.ClientConnectorError):
        return why_not_connected(error.os_error)
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(msgspec.json.decode(body))}"
    except (ValueError, RecursionError):
        text = " ".join(body[:200].decode(errors="replace").split())
        return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def _message(answer: Any) -> str:
    """The message in an OpenAI error body; the body itself if it has another shape."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
