"""Options are read from dataclasses; the ranges of those of the engine."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.options import (
    check_types,
    internal,
    options_of,
    secret,
    spell,
    with_options,
    without_secrets,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """Paint.

    Attributes:
        colour: what the eye sees, of a
            long list.
        gloss: between 0 and 1.

    Source: a shop.
    """

    colour: Literal["red", "blue"] = "red"
    gloss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """A wall.

    Attributes:
        width, height: metres.
    """

    width: int
    height: int = 2
    hooks: tuple[str, ...] = ()
    picture: Path | None = None
    is_load_bearing: bool = False
    safe: str | None = secret(None)
    id: int = internal(0)
    paint: Paint = Paint(colour="blue")


def test_options_of_nested_dataclasses_are_one_list() -> None:
    options = options_of(Wall)
    assert list(options) == [
        *("width", "height", "hooks", "picture", "is_load_bearing", "safe", "colour", "gloss")
    ]
    assert options["width"].default is MISSING
    assert options["colour"].default == "blue", "of the instance that the field holds"
    assert options["colour"].choices == ("red", "blue")
    assert options["colour"].help == "what the eye sees, of a long list."
    assert options["gloss"].help == "between 0 and 1."
    assert options["width"].help == options["height"].help == "metres."
    assert options_of(Wall(width=3))["width"].default == 3


def test_values_go_where_their_fields_are() -> None:
    wall = with_options(Wall, {"width": 4, "gloss": 0.5})
    assert wall == Wall(width=4, paint=Paint(colour="blue", gloss=0.5))
    assert with_options(wall, {"colour": "red"}).paint == Paint(colour="red", gloss=0.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("colour", "green", r"^`colour` must be red or blue, got 'green'\.$"),
        ("gloss", "0.5", r"^`gloss` must be a number or None, got '0\.5'"),
        ("gloss", True, "must be a number or None, got True"),
        ("height", 2.5, r"must be a whole number, got 2\.5"),
        ("height", True, "must be a whole number, got True"),
        ("height", None, "must be a whole number, got None"),
        ("hooks", "a", "must be a list of text, got 'a'"),
        ("hooks", [1], "must be a list of text"),
        ("picture", 1, "must be a path or None"),
        ("is_load_bearing", 1, "must be true or false, got 1"),
        ("safe", 12345, r"^`safe` must be text or None\.$"),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_way(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(Wall)[name].check(value)
    with pytest.raises(ConfigError, match=message):
        check_types(with_options(Wall(width=1), {name: value}))


def test_numbers_may_be_whole_and_paths_text() -> None:
    options = options_of(Wall)
    for name, value in (
        ("gloss", 1),
        ("gloss", None),
        ("picture", "a.png"),
        ("hooks", ["a"]),
        ("hooks", ("a",)),
    ):
        options[name].check(value)


def test_secrets_are_not_shown() -> None:
    wall = Wall(width=1, safe="behind the picture")
    assert "behind" not in repr(wall)
    assert without_secrets(wall)["safe"] == "***"
    assert without_secrets(Wall(width=1))["safe"] is None


def test_names_in_backticks_are_spelled() -> None:
    names = {"kv_gib": "--kv-gib"}
    text = "`kv_gib` must be above 0, as ``kv_gib`` of `other`."
    assert spell(text, names.get) == "--kv-gib must be above 0, as --kv-gib of `other`."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "^`block_size` must be 8, 16, 32 or 64"),
        ({"kv_gib": -1.0}, "^`kv_gib` must be above 0, got -1"),
        ({"kv_gib": "1"}, "^`kv_gib` must be a number or None, got '1'"),
        ({"gpu_memory_utilization": 0.0}, "^`gpu_memory_utilization` must be above 0 and at most 1"),
        ({"max_model_len": 0}, "^`max_model_len` must be at least 1"),
        ({"max_model_len": "long"}, "^`max_model_len` must be a number such as 4096 or 4k"),
        ({"threads": 0}, "^`threads` must be at least 1"),
        ({"engine_hang_timeout": -1}, "^`engine_hang_timeout` must be at least 0"),
        ({"dtype": "int8"}, "^`dtype` must be"),
        ({"policy": "best"}, "^`policy` must be slo"),
        ({"ttft_slo": 0.0}, "^`ttft_slo` must be above 0"),
        ({"tpot_slo": float("nan")}, "^`tpot_slo` must be finite and above 0"),
        ({"promote_before": -1.0}, "^`promote_before` must be at least 0"),
        ({"max_stop_s": float("inf")}, "^`max_stop_s` must be finite and above 0, got inf"),
        ({"safepoints": 1}, "^`safepoints` must be true or false"),
        ({"max_num_seqs": True}, "^`max_num_seqs` must be a whole number"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"^`max_num_batched_tokens` \(4\).* \(8\)"),
        ({"max_prefill_chunk_tokens": 0}, "^`max_prefill_chunk_tokens` must be at least 1"),
        ({"host_kv_gib": 0, "checkpointing": "eager"}, "^`checkpointing` eager needs a pool"),
        ({"host_kv_gib": 0, "checkpointing": "a:B"}, "^`checkpointing` a:B needs a pool"),
        (
            {"checkpointing": "late"},
            "^`checkpointing` must be adaptive, eager, swap, lazy, none or module:Class",
        ),
        ({"checkpointing": "../a:B"}, "^`checkpointing` must be"),
        ({"checkpointing": "a:B()"}, "^`checkpointing` must be"),
        ({"checkpoint_from": -0.1}, "^`checkpoint_from` must be at least 0 and below 1, got -0.1"),
        ({"checkpoint_all_from": 1.1}, "^`checkpoint_all_from` must be above 0 and at most 1, got 1.1"),
        ({"checkpoint_from": 0.9}, r"^`checkpoint_from` \(0.9\) must be below `checkpoint_all_from` \(0.9\)"),
        ({"checkpoint_from": 0.4, "checkpointing": "eager"}, "^`checkpoint_from` 0.4 is of no use"),
        ({"checkpoint_all_from": 1, "host_kv_gib": 0}, "^`checkpoint_all_from` 1 is of no use"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_it_may_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_options(EngineConfig, options).validate()


def test_an_engine_without_online_requests_needs_no_profile_and_keeps_what_it_preempts() -> None:
    offline = EngineConfig(max_model_len=64).for_offline_work()
    assert (offline.scheduler.policy, offline.scheduler.checkpointing) == ("priority", "adaptive")
    assert offline.max_model_len == 64
    assert EngineConfig(host_kv_gib=0).for_offline_work().scheduler.checkpointing == "none"
