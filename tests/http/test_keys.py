from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from backfill.core.errors import ConfigError
from backfill.http.keys import ApiKeys, parse_key_file, parse_option
from backfill.http.limits import NO_LIMITS, OwnerLimits
from tests.api.in_process import unstarted_app
from tests.jobs.doubles import InstantRunner, make_manager

pytestmark = pytest.mark.anyio

SECRET = "s3cr3t"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    return path


@pytest.fixture(autouse=True)
def no_key_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    assert SECRET not in caplog.text


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("alice=abc", "alice", "abc"),
        (" alice=abc ", "alice", "abc"),
        ("a.b-c_9=abc", "a.b-c_9", "abc"),
        ("alice=abc=def==", "alice", "abc=def=="),
        ("alice==abc", "alice", "=abc"),
        ("n" * 64 + "=abc", "n" * 64, "abc"),
        ("abc", None, "abc"),
        ("=sk-abc=def", None, "sk-abc=def"),
        ("==", None, None),
        ("sk/abc=def", None, "sk/abc=def"),  # a name has no slash
        ("n" * 65 + "=abc", None, "n" * 65 + "=abc"),
        ("x y", None, "x y"),
        ("=x y=abc", None, "x y=abc"),
        (f"x y={SECRET}", None, None),
        (f"alice ={SECRET}", None, None),
        (base64.b64encode(b"\0" * 16).decode(), None, "A" * 22 + "=="),
        (base64.b64encode(b"\0" * 32).decode(), None, "A" * 43 + "="),
        ("alice=", None, None),
        ("", None, None),
        (f"{'a' * 64}={SECRET}", None, None),
        (f"{'F' * 64}={SECRET}", None, None),
        (f"alice={SECRET} {SECRET}", None, None),
        (f"alice={SECRET}\u00e9", None, None),
    ],
)
def test_what_an_option_means(text: str, name: str | None, key: str | None) -> None:
    if key is None:
        with pytest.raises(ConfigError) as raised:
            parse_option(text)
        assert SECRET not in str(raised.value)
    else:
        parsed = parse_option(text)
        assert parsed.owner == (name or digest_of(key))
        assert parsed.digest.hex() == digest_of(key)
        assert key not in repr(parsed)


def test_an_owner_has_several_keys_and_every_key_one_owner() -> None:
    keys = ApiKeys(["alice=one", "alice=two", "bob=three", "bare", "alice=one"])
    found = {
        key: keys.owner_of(key)
        for key in ("one", "two", "three", "bare", "alice=one", "alice", "", "on\u00e9")
    }
    assert found == {
        **{"one": "alice", "two": "alice", "three": "bob", "bare": digest_of("bare")},
        **{"alice=one": None, "alice": None, "": None, "on\u00e9": None},
    }
    with pytest.raises(ConfigError, match=r"`api_key` \(number 2 of 2\): two owners have the same key"):
        ApiKeys([f"alice={SECRET}", f"bob={SECRET}"])
    with pytest.raises(ConfigError, match="two owners"):
        ApiKeys([f"alice={SECRET}", SECRET])
    with pytest.raises(ConfigError, match="`api_key`: it must not be empty"):
        ApiKeys([" "])


def test_lines_of_a_file() -> None:
    content = b"\xef\xbb\xbf# ours\r\n\n  alice = one \nalice=t=w=o\n #bob=no\nbob=three"
    assert [(key.owner, key.digest.hex()) for key in parse_key_file(content).keys] == [
        ("alice", digest_of("one")),
        ("alice", digest_of("t=w=o")),
        ("bob", digest_of("three")),
    ]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (f"alice=a\n{SECRET}\n", "line 2: expected NAME=KEY"),
        (f"={SECRET}\n", "line 1: a name must be 1 to 64"),
        (
            f"a b={SECRET}\n",
            "line 1: a limit must be concurrency, queued-tokens, requests-per-minute or weight",
        ),
        (f"a {SECRET}\n", "line 1: a limit must be"),
        (f"a={SECRET} weight=2\n", "line 1: a key must be"),
        ("a=b\na concurrency=0", "line 2: concurrency must be a whole number, at least 1, got '0'"),
        ("a=b\na concurrency=", "line 2: concurrency must be"),
        ("a=b\n* weight=nan", "line 2: weight must be from 0.001 to 1000, got 'nan'"),
        ("a=b\na weight=2 weight=3", "line 2: weight is given twice"),
        ("a=b\na weight=2\n\na weight=2", "line 4: the limits of a are given twice"),
        ("a weight=2\n", "it has no keys"),
        ("# none\n\nalice=\n", "line 3: a key must be printable ASCII without spaces, and not empty"),
        (f"alice={SECRET} # hers\n", "line 1: a key must be"),
        (f"{'0' * 64}={SECRET}\n", "line 1: a name must not be 64 hexadecimal digits"),
        (f"a={SECRET}\nb={SECRET}\n", "line 2: two owners have the same key"),
        ("a=\udcff\n", "line 1: it is not UTF-8"),
        ("\n".join(f"a={n}" for n in range(1001)), "line 1001: more than 1000 keys"),
        ("# none\n", "it has no keys"),
    ],
)
def test_an_invalid_file_is_refused_with_the_line_number(content: str, error: str, key_file: Path) -> None:
    key_file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as raised:
        ApiKeys([], key_file)
    assert str(raised.value).startswith(f"`api_key_file` {key_file}: {error}")
    assert SECRET not in str(raised.value)


def test_limits_are_of_an_owner_and_change_with_the_file(key_file: Path) -> None:
    key_file.write_text("alice=one\nalice = two\n alice  concurrency=3 weight=0.5\n")
    keys = ApiKeys(["bob=three"], key_file)
    assert keys.limits_of("alice") == OwnerLimits(concurrency=3, weight=0.5)
    assert keys.limits_of("bob") == keys.limits_of("*") == NO_LIMITS
    key_file.write_text("alice=one\n* requests-per-minute=60\nbob queued-tokens=1000\n")
    keys.reload()
    assert keys.limits_of("alice") == OwnerLimits(requests_per_minute=60)
    assert keys.limits_of("bob") == OwnerLimits(queued_tokens=1000), "the others' limits are not added"


def test_a_file_may_have_limits_alone_beside_keys_of_options(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.write_text("* concurrency=5\nbob weight=2\n")
    keys = ApiKeys(["bob=three"], key_file)
    assert (keys.limits_of("bob"), keys.limits_of("a")) == (
        OwnerLimits(weight=2.0),
        OwnerLimits(concurrency=5),
    )
    assert "no key" not in caplog.text
    key_file.write_text("")  # it may be in the middle of being written
    keys.reload()
    assert keys.limits_of("bob") == OwnerLimits(weight=2.0)
    assert "it has no keys" in caplog.text


@pytest.mark.parametrize(("option", "warns"), [("bob=three", True), ("router=three", False)])
def test_limits_of_an_owner_without_a_key_are_told(
    option: str, warns: bool, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.write_text("bbo concurrency=5\n")
    key_file.chmod(0o600)
    ApiKeys([option], key_file)
    assert [record.levelno for record in caplog.records if "bbo" in record.getMessage()] == (
        [logging.WARNING] if warns else []
    )


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read: No such file"):
        ApiKeys([], tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        ApiKeys([], tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        ApiKeys([], tmp_path / "large")


def test_a_changed_file_is_loaded_and_an_invalid_one_is_not(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def owners() -> list[str | None]:
        return [keys.owner_of(key) for key in ("fixed", "one", "two")]

    def num_errors() -> int:
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    key_file.write_text("alice=one\n")
    keys = ApiKeys(["root=fixed"], key_file)
    assert owners() == ["root", "alice", None]
    key_file.write_text("alice=one\nalice=two\n")
    keys.reload()
    assert owners() == ["root", "alice", "alice"]
    key_file.write_text(f"alice=two\n{SECRET}\n")
    for _ in range(3):
        keys.reload()
    assert owners() == ["root", "alice", "alice"]
    assert num_errors() == 1
    assert "line 2: expected NAME=KEY, or NAME and its limits. The keys are unchanged" in caplog.text
    key_file.unlink()
    for _ in range(3):
        keys.reload()
    assert owners() == ["root", "alice", "alice"]
    assert num_errors() == 2
    key_file.write_text("eve=fixed\n")  # the file gives an option's key to another owner
    keys.reload()
    assert owners() == ["root", "alice", "alice"]
    key_file.write_text("bob=two\n")
    keys.reload()
    assert owners() == ["root", None, "bob"]


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)])
def test_a_world_readable_file_logs_a_warning(
    mode: int, warns: bool, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.write_text("alice=one\n")
    key_file.chmod(mode)
    ApiKeys([], key_file)
    assert ("can be read by every user" in caplog.text) is warns


def test_the_watch_reloads_in_its_own_thread_until_stopped(key_file: Path) -> None:
    key_file.write_text("alice=one\n")
    reloaded = threading.Event()
    threads = set()

    class Watched(ApiKeys):
        def reload(self) -> None:
            threads.add(threading.current_thread())
            if keys.owner_of("two") is not None:
                reloaded.set()
            if len(threads) == 1 and not reloaded.is_set():
                super().reload()
                raise RuntimeError("an error does not end the watch")

    keys = Watched([], key_file)
    with keys.watched(poll_s=0.001):
        key_file.write_text("alice=two\n")
        assert reloaded.wait(30)
    (thread,) = threads
    assert thread is not threading.current_thread() and thread.daemon
    thread.join(30)
    assert not thread.is_alive()


async def test_a_rotated_key_keeps_its_owners_files(tmp_path: Path, key_file: Path) -> None:
    key_file.write_text("alice=old\nbob=other\n")
    keys = ApiKeys(["bare"], key_file)
    jobs = make_manager(tmp_path / "data", InstantRunner())
    await jobs.start()
    transport = httpx.ASGITransport(unstarted_app(keys, jobs))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def files_of(key: str) -> list[str] | int:
            response = await http.get("/v1/files", headers={"Authorization": f"Bearer {key}"})
            if response.status_code != 200:
                return response.status_code
            return [file["filename"] for file in response.json()["data"]]

        for key in ("old", "bare"):
            upload = await http.post(
                "/v1/files",
                headers={"Authorization": f"Bearer {key}"},
                data={"purpose": "batch"},
                files={"file": (f"{key}.jsonl", b"{}\n")},
            )
            assert upload.status_code == 200, upload.text
        key_file.write_text("alice=old\nalice=new\nbob=other\n")
        keys.reload()
        assert await files_of("old") == await files_of("new") == ["old.jsonl"]
        key_file.write_text("alice=new\nbob=other\n")
        keys.reload()
        assert await files_of("old") == 401
        assert await files_of("new") == ["old.jsonl"]
        assert await files_of("other") == []
        assert await files_of("bare") == ["bare.jsonl"]
        # The owner of a key without a name is its digest, as before keys had names.
        page = await jobs.files.list(digest_of("bare"), purpose=None, order="asc", limit=1, after=None)
        assert [file.filename for file in page.items] == ["bare.jsonl"]
    await jobs.pause()
    await jobs.stop()
