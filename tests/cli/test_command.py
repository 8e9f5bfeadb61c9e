"""Commands are made of dataclasses: flags, variables, files, and what is said of mistakes."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from cyclopts import App

from backfill.cli.command import command
from backfill.cli.own_server import server_environment
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.options import check_types, options_of, secret
from backfill.engine.options import ModelOptions
from backfill.http.config import ServerConfig
from backfill.jobs.config import JobsConfig
from backfill.router.config import ReplicaOptions
from tests.cli.running import run_cli_here
from tests.test_docs import ROOT, commands

_FLAG = re.compile(r"--[a-z-]+")
COMMANDS = ("serve", "run-batch", "pull", "profile", "bench throughput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a command of these tests.

    Attributes:
        place: where.
        max_seats: how many at most.
        price: of one.
        day: which.
        guests: who; repeatable.
        quiet: whether nobody speaks; needs ``max_seats``.
        door_code: to come in.
    """

    place: str = "here"
    max_seats: int = 8
    price: float | None = None
    day: Literal["mon", "tue"] = "mon"
    guests: tuple[str, ...] = ()
    quiet: bool = False
    door_code: tuple[str, ...] = secret(())

    def validate(self) -> None:
        check_types(self)
        if self.max_seats < 1:
            raise ConfigError(f"must be at least 1, got {self.max_seats}; see `day`.", field="max_seats")


class Meal:
    """A command whose options can be seen."""

    def __init__(self) -> None:
        self.seen: list[Options] = []
        seen = self.seen

        def meal(options: Options = Options(price=2.5)) -> None:  # frozen
            """Eat."""
            seen.append(options)

        eat = command(
            meal,
            {"Where": "place day", "Who": "max_seats price guests quiet door_code"},
            positional="place",
            spellings={"guests": "-g"},
            variables={"max_seats": "SEATS"},
        )
        self.commands = App("backfill")
        self.commands.command(eat, name="meal")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_cli_here("meal", *arguments, commands=self.commands)

    def options(self, *arguments: str) -> Options:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return self.seen.pop()


@pytest.fixture
def meal() -> Meal:
    return Meal()


def test_flags_and_defaults(meal: Meal) -> None:
    assert meal.options() == Options(price=2.5)
    assert meal.options("there", "--max-seats", "3", "--price=1") == Options(
        place="there", max_seats=3, price=1.0
    )
    assert meal.options("--max_seats", "3", "--max_seats=4").max_seats == 4
    assert meal.options("--guests", "a", "-g", "-b", "--door-code", "-x").guests == ("a", "-b")
    assert meal.options("--quiet", "--no-quiet", "--place", "none") == Options(place="none", price=2.5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", 'max-seats = 5\nday = "tue"\nquiet = true\nguests = ["a", "b"]\n'),
        ("a.yaml", "max_seats: 5\nday: tue\nquiet: true\nguests: [a, b]\nprice: null\n"),
        ("a.yml", "max_seats: 5\nday: tue\nquiet: yes\nguests:\n- a\n- b\n"),
    ],
)
def test_a_flag_goes_before_a_variable_and_that_before_the_file(
    meal: Meal, name: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(content)
    file = ("--config", str(tmp_path / name))
    expected = Options(max_seats=5, day="tue", quiet=True, guests=("a", "b"), price=2.5)
    assert meal.options(*file) == expected
    monkeypatch.setenv("BACKFILL_MAX_SEATS", "6")
    monkeypatch.setenv("BACKFILL_GUESTS", "c d")
    monkeypatch.setenv("BACKFILL_QUIET", "false")
    monkeypatch.setenv("BACKFILL_PLACE", "")
    of_variables = meal.options(*file)
    assert (of_variables.max_seats, of_variables.guests, of_variables.quiet) == (6, ("c", "d"), False)
    assert of_variables.place == "here", "an empty variable is not set"
    of_flags = meal.options(*file, "--max-seats", "7", "-g", "e", "--quiet")
    assert (of_flags.max_seats, of_flags.guests, of_flags.quiet, of_flags.day) == (7, ("e",), True, "tue")
    monkeypatch.setenv("BACKFILL_CONFIG", file[1])
    assert meal.options().day == "mon", "a file is for one command, a variable would be for all"


def test_what_kubernetes_sets_for_a_service_is_no_option(meal: Meal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKFILL_PLACE", "tcp://10.0.0.1:8000")
    assert meal.options().place == "here"


def test_a_variable_may_have_a_name_of_its_own(meal: Meal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATS", "3")
    assert meal.options().max_seats == 3
    monkeypatch.setenv("BACKFILL_MAX_SEATS", "4")
    assert meal.options().max_seats == 4
    monkeypatch.setenv("BACKFILL_CPU_ISA", "avx2")  # is no option
    assert meal.options().max_seats == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_seat = 3", "unknown option max_seat; did you mean max_seats?"),
        ("zzz = 3", "unknown option zzz."),
        ("config = 'b.toml'", "unknown option config."),
        ("max_seats = 'many'", "max_seats must be a whole number, got 'many'."),
        ("max_seats = 2.5", "max_seats must be a whole number, got 2.5."),
        ("day = 'sun'", "day must be mon or tue, got 'sun'."),
        ("guests = 'a'", "guests must be a list of text, got 'a'."),
        ("door_code = 12345", "door_code must be a list of text."),
        ("= 3", "is not TOML"),
        ("max-seats = 3\nmax_seats = 4", "max_seats is given twice."),
    ],
)
def test_files_are_refused_with_their_name_and_key(
    meal: Meal, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(content)
    done = meal.run("--config", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"backfill: {path}") and message in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "door_code: [a=SECRET\nday: mon\n",
            " is not YAML: expected ',' or ']', but got ':' (at line 2, column 4).",
        ),
        (
            "door_code: SECRET: x\n",
            " is not YAML: mapping values are not allowed here (at line 1, column 18).",
        ),
        ("max_seats: 3\nmax_seats: 4\n", ": max_seats is given twice."),
        ("- day\n", " must hold options by name."),
        ("\x00", " is not YAML."),
    ],
)
def test_errors_of_a_yaml_file_quote_nothing_of_it(
    meal: Meal, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    done = meal.run("--config", str(path))
    assert (done.returncode, done.stderr) == (1, f"backfill: {path}{message}\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.toml", "cannot be read: No such file"),
        ("a.yaml", "is not YAML"),
        ("a.ini", "must be named .toml"),
    ],
)
def test_what_is_no_configuration_file_is_refused(
    meal: Meal, name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("a: [")
    (tmp_path / "a.ini").write_text("")
    done = meal.run("--config", str(tmp_path / name))
    assert done.returncode == 1 and done.stderr.startswith(f"backfill: {tmp_path / name} {message}")
    assert done.stderr.count("\n") == 1


def test_an_error_names_an_option_as_the_user_wrote_it(
    meal: Meal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "must be at least 1, got 0; see --day.\n"
    assert meal.run("--max-seats", "0").stderr == f"backfill: --max-seats {reason}"
    path = tmp_path / "a.toml"
    path.write_text("max-seats = 0")
    assert meal.run("--config", str(path)).stderr == f"backfill: max_seats in {path} {reason}"
    monkeypatch.setenv("BACKFILL_MAX_SEATS", "0")
    done = meal.run()
    assert (done.returncode, done.stderr) == (1, f"backfill: BACKFILL_MAX_SEATS {reason}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-seats", "x"), 'Invalid value for --max-seats: unable to convert "x" into int.'),
        (("--max-seats", "2.5"), 'Invalid value for --max-seats: unable to convert "2.5" into int.'),
        (("--max-seat", "2"), "Unknown option: --max-seat. Did you mean --max-seats?"),
        (("--door-cod=sesame",), "Unknown option: --door-cod. Did you mean --door-code?"),
        (("--max-seats",), "--max-seats needs a value."),
        (("here", "there"), "Unexpected argument: there."),
    ],
)
def test_what_is_no_command_line_has_exit_status_2(
    meal: Meal, arguments: tuple[str, ...], message: str
) -> None:
    done = meal.run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"backfill: {message}\n")


def test_help_says_groups_choices_defaults_and_variables(meal: Meal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = meal.run("--help").stdout
    assert text.startswith("Usage: backfill meal ") and text.rstrip().endswith("Eat.")
    found = [" ".join(line.strip("│╭╮─").split()) for line in text.splitlines()]
    for line in (
        "Where",
        "PLACE --place Where. [default: here]",
        "--day CHOICE Which. [choices: mon, tue; default: mon]",
        "Who",
        "--max-seats INT How many at most. [default: 8; variable: SEATS]",
        "--price FLOAT Of one. [default: 2.5]",
        "--guests -g STR... Who; repeatable.",
        "--quiet --no-quiet Whether nobody speaks; needs --max-seats.",
        "--door-code STR... To come in.",
        "Configuration",
    ):
        assert line in found, line


def test_the_help_of_serve_is_short_and_names_the_one_with_every_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = run_cli_here("serve", "--help").stdout
    assert len(short.splitlines()) < 100
    assert {"--host", "--ttft-slo", "--config"} <= set(_FLAG.findall(short))
    assert "--help all lists all" in " ".join(short.split())
    every = {name for each in commands()["serve"].assemble_argument_collection() for name in each.names}
    whole = run_cli_here("serve", "--help", "all").stdout
    assert [name for name in every if name[:21] not in whole] == []  # the longest one is broken at a hyphen
    assert run_cli_here("serve", "--help-all", "--port", "1").returncode == 2
    for misspelt in (("--help", "alll"), ("-h=al",)):
        refused = run_cli_here("serve", *misspelt)
        assert refused.returncode == 2
        assert f"{' '.join(misspelt).replace('=', ' ')}: did you mean" in refused.stderr


@pytest.mark.parametrize(
    ("asked", "after"),
    [
        ("--help all", ("--port", "1")),
        ("-h all", ("m",)),
        ("--help=all", ()),
        ("--help all --port 1", ()),
    ],
)
def test_the_whole_help_is_printed_wherever_it_is_asked_for(asked: str, after: tuple[str, ...]) -> None:
    done = run_cli_here("serve", *after, *asked.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "--offload-interval" in done.stdout
    pull = run_cli_here("pull", "--help")
    assert run_cli_here("pull", *after, *asked.split()).stdout == pull.stdout, "it has no other"


@pytest.mark.parametrize("group", [[], ["bench"]])
def test_of_commands_there_is_one_help(group: list[str]) -> None:
    assert run_cli_here(*group, "--help", "all").stdout == run_cli_here(*group, "--help").stdout
    for unknown in ((*group, "serv", "--help"), (*group, "serv", "--help", "all")):
        assert run_cli_here(*unknown).returncode == 2


@pytest.mark.parametrize("name", [*(f"{name} -h" for name in COMMANDS), "serve --help all"])
def test_help_is_whole_at_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run_cli_here(*name.split())
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\u2026" not in done.stdout, "nothing is cut"
    panels = done.stdout.split("╭─")[1:]
    assert panels and all(panel.count("\n│ -") <= 14 for panel in panels)


def test_every_option_of_the_configurations_is_a_flag_of_serve() -> None:
    flags = {each.field_info.name for each in commands()["serve"].assemble_argument_collection()}
    kinds = (ModelOptions, ServerConfig, EngineConfig, JobsConfig, ReplicaOptions)
    known = {name for kind in kinds for name in options_of(kind)}
    assert flags == known | {"config"}


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    (content,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "a.toml").write_text(content.replace("smollm2-135m-instruct", "no-such-model"))
    (tmp_path / "keys").write_text("a=sesame")
    keys = ("--api-key-file", str(tmp_path / "keys"))
    done = run_cli_here("serve", "--config", str(tmp_path / "a.toml"), "--port", "0", *keys)
    assert done.stderr.startswith("backfill: no model 'no-such-model'")


def test_a_misspelt_variable_is_named_with_the_one_that_is_meant(
    meal: Meal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKFILL_MAX_SEAT", "2")
    monkeypatch.setenv("BACKFILL_TTFT_SLO", "2")  # another command's
    wrong = "backfill: BACKFILL_MAX_SEAT is no variable of this command. Did you mean BACKFILL_MAX_SEATS?\n"
    assert meal.run().stderr == wrong


def test_a_variable_with_two_letters_swapped_is_misspelt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKFILL_MODLE", "x")
    wrong = "backfill: BACKFILL_MODLE is no variable of this command. Did you mean BACKFILL_MODEL?\n"
    assert run_cli_here("pull", "no-such-model").stderr.startswith(wrong)


def test_servers_of_a_measurement_read_no_options_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKFILL_API_KEY", "secret")
    monkeypatch.setenv("BACKFILL_TTFT_SLO", "2")
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", "/cache")
    kept = {name: value for name, value in server_environment().items() if name.startswith("BACKFILL_")}
    assert kept.keys() <= {"BACKFILL_CACHE_ROOT", "BACKFILL_CPU_ISA"}
    assert kept["BACKFILL_CACHE_ROOT"] == "/cache"


def test_variables_of_a_server_are_none_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKFILL_SEED", "none")
    monkeypatch.setenv("BACKFILL_BENCH_ROUNDS", "none")
    done = run_cli_here("bench", "coserve")
    assert (done.returncode, "BACKFILL_BENCH_ROUNDS" in done.stderr) == (2, True)


def test_a_measurement_says_which_variables_its_servers_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKFILL_DTYPE", "float32")
    monkeypatch.setenv("BACKFILL_BENCH_ROUNDS", "1")
    done = run_cli_here("bench", "coserve", "--policies", "slo", "--model", "/no/such/model")
    assert "Not used, as servers take options from --server-option here: BACKFILL_DTYPE\n" in done.stderr
