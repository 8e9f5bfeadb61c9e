"""The limits of a connection, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from backfill.core.errors import ConfigError
from backfill.http import connection
from backfill.http.connection import MAX_PIPELINED
from tests.api.servers import TIMEOUT_S, wait_until
from tests.api.sockets import App, RawClient, echo, limits, request, serving
from tests.patience import with_more_time

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(echo, limits()) as port:
        yield port


def with_timeout(
    app: App, attempt: Callable[[int, float], None], *names: str, timeout_s: float = 0.1
) -> None:
    """Run ``attempt`` with the port of a server with these time limits, and their length.

    A client that the machine stalls meets a limit too early; it is given more time.
    """

    def attempt_with(factor: float) -> None:
        with serving(app, limits(**dict.fromkeys(names, factor * timeout_s))) as port:
            attempt(port, factor * timeout_s)

    with_more_time(attempt_with)


def assert_refused(client: RawClient, status: int, part: str) -> None:
    answered, body = client.answer()
    assert answered == status, body
    assert part in json.loads(body)["error"]["message"]
    assert client.is_closed()


HEAD_PIECES = [b"GET /a HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"PRI * HTTP/2.0\r\n"]
HEAD_PIECES += [b"Host: localhost\r\n", b"Host: \xff\r\n", b"Origin: null\r\n", b"Expect: 100-continue\r\n"]
HEAD_PIECES += [b"Content-Length: %s\r\n" % each for each in (b"5", b"-1", b"0x5", b"9" * 30, b"5, 5")]
HEAD_PIECES += [b"Transfer-Encoding: chunked\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"a" * 9000]
HEAD_PIECES += [b"\r\n", b"\r\n\r\n", b"\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"f" * 20 + b"\r\n"]
HEAD_PIECES += [b"\0", b": "]


@given(st.lists(st.sampled_from(HEAD_PIECES) | st.binary(max_size=9), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_arrives_gets_an_answer_that_is_no_bug(port: int, pieces: list[bytes]) -> None:
    with RawClient(port) as client:
        client.socket.sendall(b"".join(pieces))
        client.socket.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionResetError):
            while part := client.socket.recv(1 << 16):
                received += part
    statuses = {int(each) for each in re.findall(rb"^HTTP/1\.1 (\d{3}) ", received, re.MULTILINE)}
    assert statuses <= {100, 200, 400, 403, 408, 413, 414, 431}, received[:200]
    with RawClient(port) as client:
        client.send(request(path="/after"))
        assert client.answer() == (200, b"/after ")


def test_requests_follow_one_another_on_a_connection(port: int) -> None:
    with RawClient(port) as client:
        for number in range(3):
            client.send(request(path=f"/{number}", body=b"x" * number))
            assert client.answer() == (200, f"/{number} ".encode() + b"x" * number)


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    with RawClient(port) as client:
        client.send(b"".join(request(path=f"/{number}", body=b"y" * 10_000) for number in range(10)))
        for number in range(10):
            assert client.answer() == (200, f"/{number} ".encode() + b"y" * 10_000)
        client.send(request(path="/after"))
        assert client.answer() == (200, b"/after ")


def test_pipelined_heads_may_together_be_over_the_limit_of_one(port: int) -> None:
    large = request(headers={"X-Large": "h" * 30_000})
    with RawClient(port) as client:
        client.send(large * 5)
        for _ in range(5):
            assert client.answer()[0] == 200


def test_more_pipelined_requests_than_are_kept_end_the_connection() -> None:
    disconnected = threading.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    with serving(never, limits()) as port, RawClient(port) as client:
        client.send(request() * (MAX_PIPELINED + 2))
        assert client.is_closed()
        assert disconnected.wait(TIMEOUT_S), "the running request sees the disconnect"


def test_a_slow_body_in_chunks_of_a_byte_is_accepted(port: int) -> None:
    body = b"".join(b"1\r\nz\r\n" for _ in range(20_000)) + b"0\r\n\r\n"
    with RawClient(port) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        assert client.answer() == (200, b"/ " + b"z" * 20_000)


@pytest.mark.parametrize(
    "head",
    [
        b"X-A: " + b"a" * 70_000 + b"\r\n\r\n",
        b"X-A: " + b"a" * 70_000,  # without an end
        b"X-A: b\r\n" * 10_000,
        b"X-A: b\r\n" * 1_000_000 + b"\r\n",
        b"a" * 100_000,
    ],
    ids=["one", "endless", "many", "megabytes", "name"],
)
def test_a_head_over_the_limit_is_431(port: int, head: bytes) -> None:
    with RawClient(port) as client:
        try:
            client.send(HEAD + head)
        except ConnectionError:
            return  # cut off while it was sending
        assert_refused(client, 431, "65536 bytes")


@pytest.mark.parametrize(
    "chunks",
    [
        b"3\r\nabc\r\n0\r\nX-A: " + b"a" * 70_000,
        b"3\r\nabc\r\n0\r\n" + b"X-A: b\r\n" * 20_000,
        b"3;" + b"e" * 100_000,
    ],
    ids=["one trailer", "many trailers", "extension of a chunk"],
)
def test_what_is_sent_beside_a_chunked_body_is_limited_as_a_head_is(port: int, chunks: bytes) -> None:
    with RawClient(port) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert_refused(client, 431, "65536 bytes")


def test_a_url_over_the_limit_is_414(port: int) -> None:
    with RawClient(port) as client:
        client.send(request(path="/" + "u" * 9000))
        assert_refused(client, 414, "8192 bytes")
    with RawClient(port) as client:
        client.send(request(path="/" + "u" * 8000))
        assert client.answer()[0] == 200


def test_invalid_http_is_400_in_openais_shape(port: int) -> None:
    with RawClient(port) as client:
        client.send(b"\x16\x03\x01 hello\r\n\r\n")
        assert_refused(client, 400, "HTTP")


def test_an_upgrade_is_not_offered_and_answered_as_any_request(port: int) -> None:
    with RawClient(port) as client:
        client.send(request("GET", headers={"Connection": "Upgrade", "Upgrade": "websocket"}))
        assert client.answer()[0] == 200


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "after an answer"])
@pytest.mark.parametrize("drips", [False, True], ids=["ends", "byte by byte"])
def test_a_head_that_is_not_complete_in_time_is_408(earlier: bool, drips: bool) -> None:
    def attempt(port: int, timeout_s: float) -> None:
        with RawClient(port) as client:
            if earlier:
                client.send(request(path="/first"))
                assert client.answer() == (200, b"/first ")
            with _Dripping(client, HEAD + b"X-A: " + b"a" * 2000) if drips else nullcontext():
                if not drips:
                    client.send(HEAD)
                assert_refused(client, 408, "head")

    with_timeout(echo, attempt, "head_timeout_s")


@pytest.mark.parametrize("first", [b"", b"\r\n"], ids=["silence", "empty lines"])
def test_a_connection_without_a_request_is_closed(first: bytes) -> None:
    with serving(echo, limits(head_timeout_s=0.2)) as port, RawClient(port) as client:
        client.send(first)
        assert client.is_closed()


def test_a_body_that_stops_is_408_and_its_request_ends() -> None:
    ended = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        ended.set()

    with serving(app, limits(body_timeout_s=0.2)) as port, RawClient(port) as client:
        client.send(HEAD + b"Content-Length: 10\r\n\r\nabc")
        assert_refused(client, 408, "body")
        assert ended.wait(TIMEOUT_S)


def test_a_body_that_goes_on_may_take_long() -> None:
    def attempt(port: int, timeout_s: float) -> None:
        with RawClient(port) as client:
            client.send(HEAD + b"Content-Length: 20\r\n\r\n")
            for _ in range(20):
                client.send(b"b")
                time.sleep(0.15 * timeout_s)
            assert client.answer() == (200, b"/ " + b"b" * 20)

    with_timeout(echo, attempt, "body_timeout_s")


def test_a_body_that_arrives_byte_by_byte_is_408_in_the_end() -> None:
    patient = limits(whole_body_timeout_s=0.4)
    with serving(echo, patient) as port, RawClient(port) as client:
        client.send(HEAD + b"Content-Length: 2000\r\n\r\n")
        with _Dripping(client, b"b" * 2000):
            assert_refused(client, 408, "not complete after 0.4 s")


def test_a_large_body_that_arrives_fast_enough_may_exceed_the_time_limit() -> None:
    with serving(echo, limits(whole_body_timeout_s=0.1)) as port, RawClient(port) as client:
        client.send(HEAD + b"Content-Length: 1000001\r\n\r\n" + b"c" * 1_000_000)
        time.sleep(0.5)
        client.send(b"c")
        assert client.answer() == (200, b"/ " + b"c" * 1_000_001)


def test_time_that_the_application_takes_does_not_count_against_the_client() -> None:
    pauses_s: list[float] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(pauses_s[-1])  # while the rest of the body waits in the socket
        await echo(scope, receive, send)

    def attempt(port: int, timeout_s: float) -> None:
        pauses_s.append(4 * timeout_s)
        with RawClient(port) as client:
            client.send(request(body=b"c" * 500_000))
            assert client.answer()[0] == 200

    with_timeout(slow, attempt, "head_timeout_s", "body_timeout_s", "write_timeout_s")


refuse = Response(b"no", 413)  # without reading a body


def test_the_rest_of_an_answered_body_has_a_time_limit() -> None:
    def attempt(port: int, timeout_s: float) -> None:
        with RawClient(port) as client:
            client.send(HEAD + b"Content-Length: 100000\r\n\r\n")
            assert client.answer() == (413, b"no")
            with _Dripping(client, b"d" * 10_000):
                assert client.is_closed()
        with RawClient(port) as client:
            client.send(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
            assert client.answer() == (413, b"no")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                _send_without_end(client)

    with_timeout(refuse, attempt, "head_timeout_s", "body_timeout_s")


def test_a_client_that_asks_to_close_may_send_its_body_to_the_end_and_reads_the_answer() -> None:
    """Closed before the body came, the connection would be reset, and the answer lost."""
    with serving(refuse, limits()) as port, RawClient(port) as client:
        client.send(request(body=b"e" * 5_000_000, headers={"Connection": "close"}))
        assert client.answer() == (413, b"no")
        assert client.is_closed()


def test_a_body_that_is_no_valid_http_after_its_answer_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(refuse, limits()) as port, RawClient(port) as client:
        client.send(head + b"5\r\nhello\r\n")
        assert client.answer() == (413, b"no")
        client.send(b"no size\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            _send_without_end(client)
    assert not [each for each in caplog.records if each.name == "asyncio"], "nothing is written after the end"


def test_a_response_that_is_cut_off_ends_the_connection_before_the_body_has_come() -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"n", "more_body": True})

    with serving(fail, limits()) as port, RawClient(port) as client:
        client.send(HEAD + b"Content-Length: %d\r\n\r\nabc" % (1 << 40))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            _send_without_end(client)


def test_nothing_runs_that_follows_an_answer_with_which_the_connection_closes() -> None:
    paths = []

    async def close(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await Response(b"no", 413, {"connection": "close"})(scope, receive, send)

    first = request(path="/first", body=b"hello")
    with serving(close, limits()) as port:
        with RawClient(port) as client:
            client.send(first[:-1])
            assert client.answer() == (413, b"no")
            client.send(first[-1:] + request(path="/after"))
            assert client.is_closed()
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                _send_without_end(client)
        with RawClient(port) as client:
            client.send(first + request(path="/behind", body=b"hello")[:-1])
            assert client.answer() == (413, b"no")
            assert client.is_closed()
    assert paths == ["/first", "/first"]


def test_connections_over_the_limit_get_503() -> None:
    with serving(echo, limits(max_connections=2)) as port:
        with RawClient(port) as one, RawClient(port) as two:
            for client in (one, two):
                client.send(request())
                assert client.answer()[0] == 200
            with RawClient(port) as third:
                assert_refused(third, 503, "connections")
            one.send(request())
            assert one.answer()[0] == 200
        _wait_for_room(port)


@pytest.mark.parametrize("chunk_bytes", [1_000, 1_000_000], ids=["small", "large"])
def test_a_reader_that_stops_is_aborted_and_its_request_ends(chunk_bytes: int) -> None:
    """Also if the rest fits the server's buffer and the application is done."""
    ended = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20_000_000 // chunk_bytes):
            await send({"type": "http.response.body", "body": b"e" * chunk_bytes, "more_body": True})
        ended.set()

    quick = limits(write_timeout_s=0.2)
    with serving(app, quick) as port, RawClient(port, receive_buffer_bytes=4096) as client:
        client.send(request())
        assert ended.wait(TIMEOUT_S)
        _assert_reset(client)


def test_the_end_of_an_unread_response_is_dropped() -> None:
    answered = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"f" * 20_000_000})
        answered.set()

    quick = limits(write_timeout_s=0.2, max_connections=1)
    with serving(app, quick) as port, RawClient(port, receive_buffer_bytes=4096) as client:
        client.send(request())
        assert answered.wait(TIMEOUT_S)
        _wait_for_room(port)
        _assert_reset(client)


def test_a_slow_reader_gets_everything() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"3000000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(30):
            await send({"type": "http.response.body", "body": b"g" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def attempt(port: int, timeout_s: float) -> None:
        with RawClient(port, receive_buffer_bytes=4096) as client:
            client.send(request())
            for _ in range(40):
                time.sleep(0.02)
                client._received += client.socket.recv(65536)
            assert len(client.answer()[1]) == 3_000_000

    with_timeout(app, attempt, "write_timeout_s", timeout_s=2.0)


class _Dripping:
    """Send single bytes until the block is left or the request is refused."""

    def __init__(self, client: RawClient, data: bytes) -> None:
        self._client, self._data, self._left = client, data, threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _send(self) -> None:
        for byte in self._data:
            try:
                self._client.send(bytes([byte]))
            except OSError:
                return
            if self._left.wait(0.02):
                return


def _send_without_end(client: RawClient) -> None:
    while True:
        client.send(b"d" * 100_000)


def _assert_reset(client: RawClient) -> None:
    def read_all() -> None:
        while client.socket.recv(1 << 20):
            pass

    with pytest.raises(ConnectionResetError):
        read_all()


def _wait_for_room(port: int) -> None:
    """Wait until the server accepts a connection again."""

    def is_served() -> bool:
        with RawClient(port) as client, suppress(ConnectionError):
            client.send(request("GET"))
            return b" 200" in client.socket.recv(12)
        return False

    wait_until(is_served, "room for a connection")


def test_a_uvicorn_without_the_hook_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    with pytest.raises(ConfigError, match="uvicorn"):
        runpy.run_path(connection.__file__)
