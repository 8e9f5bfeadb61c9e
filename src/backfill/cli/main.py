"""Entry point of the ``backfill`` command."""

from __future__ import annotations

import difflib
import re
import sys

from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from backfill.cli.command import HELP_ALL
from backfill.core.errors import BackfillError, ConfigError


def _version() -> str:
    from backfill import __version__

    return f"backfill {__version__}"


# Commands are named by their modules, which are imported when they are run.
bench = App(name="bench", help="Measure a server or the engine.")
bench.command("backfill.cli.bench_throughput:app", name="throughput", help="Time the engine without HTTP.")
bench.command("backfill.cli.bench_coserve:app", name="coserve", help="Measure online and offline load.")

app = App(
    name="backfill",
    help="Serve one language model to latency-critical and batch requests on the same accelerators.",
    help_format="plaintext",
    version=_version,
)
app.command("backfill.cli.serve:app", name="serve", help="Serve a model over an OpenAI-compatible HTTP API.")
app.command("backfill.cli.chat:chat_app", name="chat", help="Talk with a model in the terminal.")
app.command("backfill.cli.chat:run_app", name="run", help="Answer one prompt in the terminal.")
app.command(
    "backfill.cli.run_batch:app", name="run-batch", help="Answer requests of a file without a server."
)
app.command("backfill.cli.router:app", name="router", help="Divide requests among several servers.")
app.command("backfill.cli.pull:app", name="pull", help="Fetch a model, and print its folder.")
app.command("backfill.cli.profile:app", name="profile", help="Time a model and save its cost profile.")
app.command(
    "backfill.cli.doctor:app",
    name="doctor",
    help="Say what this machine has, and what auto chooses.",
)
app.command("backfill.cli.simulate:app", name="simulate", help="Run a scenario in simulated time.")
app.command(bench)


def main(commands: App = app) -> None:
    """Run the command line; ``--some_option`` and ``--some-option`` are equal, as in vLLM.

    Raises: SystemExit, with status 2 for what is no command line.
    """
    try:
        arguments = _with_whole_help(commands, [_with_hyphens(argument) for argument in sys.argv[1:]])
    except ConfigError as error:
        print(f"backfill: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        commands(arguments, result_action="return_value", exit_on_error=False, print_error=False)
    except CycloptsError as error:
        print(f"backfill: {_usage_error(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except BackfillError as error:
        print(f"backfill: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    _, apps, _ = commands.parse_commands(arguments)
    raise SystemExit(2 if apps[-1].default_command is None else 0)  # 2: no command was named


def _usage_error(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError):
        return f"Unexpected argument: {(error.unused_tokens or [''])[0]}."
    if isinstance(error, MissingArgumentError) and error.argument is not None and not error.tokens_so_far:
        return (
            f"{error.argument.name} is required." if not error.keyword else f"{error.keyword} needs a value."
        )
    error.verbose = False
    if isinstance(error, UnknownOptionError):
        name = (error.token.keyword or error.token.value).partition("=")[0]
        error.token = error.token.evolve(keyword=name, value="")  # the value may be a key
    return str(error)


def _with_whole_help(commands: App, arguments: list[str]) -> list[str]:
    """Nothing else counts beside ``--help all``, as beside ``--help``.

    Raises: ConfigError for a word like ``all``.
    """
    for index, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        value = value or "".join(arguments[index + 1 : index + 2])
        if flag not in ("--help", "-h") or not difflib.get_close_matches(value, ["all"]):
            continue
        names, apps, _ = commands.parse_commands(arguments[:index])
        if HELP_ALL not in apps[-1]:
            return [*arguments[:index], "--help"]
        if value != "all":
            raise ConfigError(f"{flag} {value}: did you mean {flag} all, for every option?")
        return [*names, HELP_ALL]
    return arguments


def _with_hyphens(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    # Up to a "=" or a space: `--server-option "--profile my_profile.json"` is an argument too.
    name = re.split(r"[=\s]", argument, maxsplit=1)[0]
    return name.replace("_", "-") + argument[len(name) :]
