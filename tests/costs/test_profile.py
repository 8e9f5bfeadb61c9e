from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backfill.core.errors import ConfigError
from backfill.costs.profile import CostProfile
from tests.builders import make_profile

PROFILE = make_profile(model="llama-3x48", device="a processor, 4 threads", dtype="bfloat16")


def saved(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A saved profile's file and its contents."""
    path = folder / "profile.json"
    PROFILE.save(path)
    return path, json.loads(path.read_text())


def refusal(path: Path, content: bytes) -> str:
    """The message, which names the file, that refuses a profile of these contents."""
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        CostProfile.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there.json"
    PROFILE.save(path)
    assert CostProfile.load(path) == PROFILE
    assert [each.name for each in path.parent.iterdir()] == ["there.json"]


def test_a_disk_that_is_full_leaves_the_file_as_it_was_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(tmp_path)
    write = os.write

    def run_full(file: int, data: memoryview) -> int:
        write(file, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", run_full)
    with pytest.raises(OSError, match="No space left"):
        replace(PROFILE, provenance="another").save(path)
    assert CostProfile.load(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]


def test_processes_with_one_id_write_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers: the second saves while the first is about to rename its file."""
    path, first = tmp_path / "profile.json", replace(PROFILE, provenance="first")
    renamed: list[Path] = []
    rename = os.replace

    def save_another_first(partial: Path, target: Path) -> None:
        renamed.append(partial)
        if len(renamed) == 1:
            PROFILE.save(path)
        rename(partial, target)

    monkeypatch.setattr(os, "replace", save_another_first)
    first.save(path)
    assert CostProfile.load(path) == first
    assert len(set(renamed)) == 2


def test_the_content_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the rename would else leave an empty profile, which a start refuses."""
    done: list[str] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("sync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), rename(*paths)))
    PROFILE.save(tmp_path / "profile.json")
    assert done[:2] == ["sync", "rename"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"format": 4', b"not JSON", b"\xff\xfe\x00", b"\0" * 100, b"[" * 100_000, b"9" * 5000],
    ids=["empty", "brace", "torn", "text", "no-unicode", "zeros", "nested", "number"],
)
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "is not JSON: run `backfill profile`" in refusal(tmp_path / "profile.json", content)


@pytest.mark.parametrize("content", [b"[]", b"null", b"7", b"{}", b'{"format": 2}', b'{"format": "1"}'])
def test_other_formats_are_refused(tmp_path: Path, content: bytes) -> None:
    assert "is not of format 4: run `backfill profile`" in refusal(tmp_path / "profile.json", content)


def assign(*where: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for part in where[:-1]:
            content = content[part]
        content[where[-1]] = value

    return change


def drop(*where: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for part in where[:-1]:
            content = content[part]
        del content[where[-1]]

    return change


ROWS = ("cost", "rows_s")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (drop("key"), "key"),
        (drop("known_tokens"), "known_tokens"),
        (assign("quality", value="good"), "value 'good' - at `$.quality`"),
        (assign("known_tokens", value=-1), "Expected `int` >= 0 - at `$.known_tokens`"),
        (assign("key", "model", value=7), "Expected `str`, got `int` - at `$.key.model`"),
        (assign("num_layers", value=0), "Expected `int` >= 1 - at `$.num_layers`"),
        (assign("num_layers", value="32"), "Expected `int`, got `str` - at `$.num_layers`"),
        (assign("cost", "request_s", value=-1e-9), "Expected `float` >= 0.0 - at `$.cost.request_s`"),
        (assign("cost", "request_s", value=float("nan")), "at `$.cost.request_s`"),
        (assign("cost", "prefill_context_s", value=10**400), "out of range - at `$.cost.prefill_context_s`"),
        (assign(*ROWS, "y", 2, value=float("nan")), "at `$.cost.rows_s.y[2]`"),
        (assign(*ROWS, "x", 0, value=-1), "at `$.cost.rows_s.x[0]`"),
        (assign(*ROWS, "x", 1, value=0.5), "x must ascend"),
        (assign(*ROWS, "y", 1, value=1e9), "y must not be negative or descend"),
        (assign(*ROWS, "x", value=[1.0, 2.0]), "2 x and 8 y"),
        (assign("cost", "sampled_s", value={"x": [], "y": []}), "two or more points"),
        (assign("copies", "to_host_bytes_per_s", value=0), "> 0.0 - at `$.copies.to_host_bytes_per_s`"),
    ],
)
def test_a_damaged_profile_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], part: str
) -> None:
    path, content = saved(tmp_path)
    change(content)
    message = refusal(path, json.dumps(content).encode())
    assert re.search(r"is damaged \(.*: run `backfill profile`", message)
    assert part in message


def test_whole_numbers_and_unknown_fields_are_accepted(tmp_path: Path) -> None:
    path, content = saved(tmp_path)
    content["cost"]["request_s"] = 1
    content["of a later release"] = {"a": 1}
    path.write_text(json.dumps(content))
    assert CostProfile.load(path).cost.request_s == 1.0


@pytest.mark.parametrize("name", ["missing.json", "folder", "file/below"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be read: [A-Z][a-z ]+") as caught:
        CostProfile.load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("field", ["model", "device", "dtype"])
def test_a_profile_of_something_else_is_refused_with_what_differs(field: str) -> None:
    PROFILE.check_key(replace(PROFILE.key), "a.json")
    here = replace(PROFILE.key, **{field: "what is here"})
    with pytest.raises(ConfigError) as caught:
        PROFILE.check_key(here, "a.json")
    message = str(caught.value)
    assert message.startswith(f"The profile a.json is of another {field}: ")
    assert repr(getattr(PROFILE.key, field)) in message
    assert "'what is here'" in message
    assert "`backfill profile`" in message
    for other in {"model", "device", "dtype"} - {field}:
        assert f"another {other}" not in message
