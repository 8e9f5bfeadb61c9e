"""Sockets in place of ports, certificates, and the path of a reverse proxy."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from starlette.responses import Response

from backfill.cli.startup import Address, bind, first_request, listen
from backfill.core.errors import ConfigError
from backfill.http.app import new_app
from backfill.http.config import ServerConfig
from backfill.http.server import HttpServer
from tests.api.sockets import limits, running


@contextmanager
def serving(config: ServerConfig) -> Iterator[Address]:
    address = listen(config)
    server = HttpServer(Response(b"hello"), limits(), certificate=config.certificate)
    with running(server, address.listener):
        yield address


def test_a_socket_in_place_of_a_port_is_taken_over_once_nobody_listens(tmp_path: Path) -> None:
    config = ServerConfig(uds=tmp_path / "backfill.sock")
    for _ in range(2):  # the first one leaves its socket
        with (
            serving(config) as address,
            httpx.Client(transport=httpx.HTTPTransport(uds=str(config.uds))) as client,
        ):
            assert client.get("http://localhost/").text == "hello"
            with pytest.raises(ConfigError, match=r"`uds` .*backfill\.sock: Address already in use"):
                listen(config)
    assert address.url == f"http+unix://{config.uds}"
    assert f"curl --unix-socket {config.uds} http://localhost/v1/" in first_request(
        address.url, 8192, asks_for_keys=False
    )


@pytest.mark.parametrize("name", ["missing/a.sock", "x" * 120])
def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"`uds` .*{name}: "):
        listen(ServerConfig(uds=tmp_path / name))


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("127.0.0.1", "127.0.0.1")]
)
def test_the_address_that_is_shown_can_be_opened(host: str, shown: str) -> None:
    with serving(ServerConfig(host=host, port=0)) as address:
        port = address.listener.getsockname()[1]
        assert address.url == f"http://{shown}:{port}"
        assert httpx.get(address.url).text == "hello"
        is_anywhere = host != shown.strip("[]")
        assert ("all other addresses" in address.place) == is_anywhere
        assert ("for anyone, without a key" in address.place) == is_anywhere


def test_a_port_in_use_is_named_with_the_option_for_another() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=r"in use\. Another one: --port\."):
        bind("127.0.0.1", taken.getsockname()[1])


def test_what_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="Address already in use"):
        listen(ServerConfig(uds=tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_socket_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        listen(ServerConfig(uds=tmp_path / "a.sock")).listener.close()
    finally:
        os.umask(before)
    assert (tmp_path / "a.sock").stat().st_mode & 0o077 == 0


def test_a_certificate_makes_it_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    config = ServerConfig(port=0, ssl_certfile=tmp_path / "both.pem")
    with serving(config) as address, httpx.Client(verify=context) as client:
        assert address.url.startswith("https://127.0.0.1:")
        assert client.get(address.url).text == "hello"
        with pytest.raises(httpx.TransportError):
            client.get(address.url.replace("https", "http"))
        assert client.get(address.url).text == "hello"


@pytest.mark.parametrize(
    ("certificate", "key", "part"),
    [
        ("empty", None, "`ssl_certfile` .*empty cannot be used: it holds no certificate in PEM form"),
        ("key", None, "`ssl_certfile` .*key cannot be used: it holds no certificate in PEM form"),
        ("missing", "key", "`ssl_certfile` .*missing cannot be used: No such file"),
        ("certificate", "missing", "`ssl_keyfile` .*missing cannot be used: No such file"),
        (
            "certificate",
            None,
            "`ssl_certfile` .*certificate cannot .* no private key .*; `ssl_keyfile` names",
        ),
        ("certificate", "empty", "`ssl_keyfile` .*empty cannot be used: it holds no private key in PEM form"),
        (
            "certificate",
            "encrypted",
            "`ssl_keyfile` .*encrypted cannot be used: its private key is encrypted",
        ),
        (
            "certificate",
            "other_key",
            "`ssl_keyfile` .*other_key cannot .* not that of the certificate in .*cert",
        ),
        (
            "damaged",
            "key",
            "`ssl_certfile` .*damaged cannot .*: OpenSSL refuses it with `ssl_keyfile` .*key: ",
        ),
    ],
)
def test_files_that_are_no_certificate_are_refused_with_what_is_wrong(
    tmp_path: Path, certificate: str, key: str | None, part: str
) -> None:
    authority = trustme.CA()
    issued, other = (authority.issue_cert("127.0.0.1") for _ in range(2))
    password = BestAvailableEncryption(b"secret")
    private_key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    files = {
        "empty": b"",
        "certificate": issued.cert_chain_pems[0].bytes(),
        "damaged": b"-----BEGIN CERTIFICATE-----\nzzzz\n-----END CERTIFICATE-----\n",
        "key": issued.private_key_pem.bytes(),
        "other_key": other.private_key_pem.bytes(),
        "encrypted": private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, password),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    config = ServerConfig(
        port=0, ssl_certfile=tmp_path / certificate, ssl_keyfile=None if key is None else tmp_path / key
    )
    with pytest.raises(ConfigError, match=f"^{part}"):
        listen(config)


def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`ssl_certfile`"):
        ServerConfig(ssl_keyfile=tmp_path / "a.pem").validate()


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b"])
def test_a_root_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="such as /llm"):
        ServerConfig(root_path=path).validate()


def test_the_document_names_the_path_of_the_proxy() -> None:
    class NoJobs:
        jobs = None

    app = new_app("t", (), NoJobs(), "/llm")  # type: ignore[arg-type]
    assert app.openapi()["servers"] == [{"url": "/llm"}]


def test_traces_without_opentelemetry_are_refused_before_a_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = ServerConfig(port=0, otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'backfill\[otel\]'"):
        listen(config)
