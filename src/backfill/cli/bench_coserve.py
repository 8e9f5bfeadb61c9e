"""``backfill bench coserve``: online load beside offline load on real servers, policy by policy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from backfill.cli.bench_options import authorization, check_at_least, note, server_url
from backfill.cli.interrupts import interruptible
from backfill.cli.plots import check_folder, check_plot
from backfill.cli.startup import run_in_loop
from backfill.cli.typer_command import typer_command
from backfill.core.config import PolicyName
from backfill.core.errors import BackfillError, ConfigError
from backfill.models.resolve import DEFAULT_MODEL

if TYPE_CHECKING:
    from backfill.bench.coserve import CoserveRun
    from backfill.bench.coserve_figures import CoserveFigures, Timeline
    from backfill.bench.coserve_load import CoserveLoad
    from backfill.cli.own_server import OwnServer

_DEFAULT_POLICIES = "online-only,fcfs,priority,slo"
_LOG_LINES = 15

# Name in the table, key of the result, format.
_FIGURES = (
    ("TTFT P50 s", "ttft_p50_s", ".3f"),
    ("TTFT P99 s", "ttft_p99_s", ".3f"),
    ("/ online-only", "ttft_p99_over_online_only", ".2f"),
    ("ITL P50 s", "itl_p50_s", ".3f"),
    ("ITL P99 s", "itl_p99_s", ".3f"),
    ("TTFT met", "ttft_attainment", ".1%"),
    ("ITL met", "itl_attainment", ".1%"),
    ("total tok/s", "total_tok_s", ".0f"),
    ("/ fcfs", "total_tok_s_over_fcfs", ".2f"),
    ("online tok/s", "online_tok_s", ".0f"),
    ("offline tok/s", "offline_tok_s", ".0f"),
    ("recomputed", "recomputed_token_share", ".2%"),
    ("restored", "restored_token_share", ".1%"),
    ("aborted", "aborted_token_share", ".1%"),
    ("failed", "failed", "d"),
    ("unfinished", "unfinished", "d"),
)


def coserve(
    policies: Annotated[
        str | None,
        typer.Option(
            help="Policies to start a server for, one after another, separated by commas, each with options "
            f'of its own if need be: "slo,slo --checkpointing none". Default: {_DEFAULT_POLICIES}.'
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="URL of a running server to load instead, ours or another OpenAI-compatible one."),
    ] = None,
    label: Annotated[str, typer.Option(help="Name of the server at --base-url in the result.")] = "server",
    model: Annotated[
        str | None,
        typer.Option(help=f"Default: {DEFAULT_MODEL}, or the first one of the server at --base-url."),
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds to measure.")] = 120.0,
    warmup: Annotated[float, typer.Option(help="Seconds of the same load before, not measured.")] = 10.0,
    rate: Annotated[float, typer.Option(help="Online requests per second.")] = 0.7,
    cv: Annotated[
        float, typer.Option(help="Coefficient of variation of the gaps between them: 1 Poisson, 0 constant.")
    ] = 1.0,
    input_len: Annotated[str, typer.Option(help="Tokens of an online prompt: N or LOW:HIGH.")] = "256",
    output_len: Annotated[str, typer.Option(help="Tokens of an online output.")] = "64",
    offline_mode: Annotated[
        str,
        typer.Option(
            help="How offline work is sent: flex (service_tier), priority (1, online 0, as vLLM takes it), "
            "batch (through the Batch API) or none."
        ),
    ] = "flex",
    offline_input_len: Annotated[str, typer.Option(help="Tokens of an offline prompt.")] = "256:512",
    offline_output_len: Annotated[str, typer.Option(help="Tokens of an offline output.")] = "32:128",
    offline_concurrency: Annotated[
        int, typer.Option(help="Offline requests kept at the server; a batch's are the server's choice.")
    ] = 128,
    offline_lines: Annotated[
        int, typer.Option(help="Lines of the batch's file, submitted again should they all be done.")
    ] = 2000,
    ttft_slo: Annotated[
        float, typer.Option(help="Objective in seconds, also of servers started here.")
    ] = 1.0,
    tpot_slo: Annotated[float, typer.Option(help="Objective of every gap in seconds, likewise.")] = 0.15,
    server_option: Annotated[
        list[str] | None,
        typer.Option(help='More options of the servers started here, such as "--threads 2"; repeatable.'),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="How often to go through the policies; figures are medians.")
    ] = 1,
    seed: Annotated[
        int, typer.Option(help="Of arrivals, lengths and prompts; each round takes the next one.")
    ] = 0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that online requests may still take after the measurement.")
    ] = 120.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds a server may take to start.")] = 600.0,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Result of an earlier run to show beside this one's; repeatable."),
    ] = None,
    result: Annotated[
        Path | None, typer.Option(help="File for the result as JSON, with timelines, for --compare.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG timeline to this file.")] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the servers' logs. Default: kept only of a server that failed."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not verify the server's certificate.")
    ] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No live display.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON too, as the last line.")
    ] = False,
) -> None:
    """Load servers with online and offline requests at once and compare their policies.

    By default starts one server per policy, one after the other. Every policy gets the same online requests
    at the same instants; online-only gets no offline ones. The API key is taken from OPENAI_API_KEY. Exit
    code 0 if everything was measured, 1 if not, 130 after Ctrl-C; what was measured is shown all the same.
    """
    try:
        check_plot(plot)
        check_folder("--result", result)
        check_at_least(("--rounds", rounds, 1))
        if not start_timeout > 0:
            raise ConfigError(f"--start-timeout must be above 0, got {start_timeout:g}.")
        from backfill.bench.coserve_load import CoserveLoad, LengthRange, OfflineMode

        if offline_mode not in list(OfflineMode):
            names = ", ".join(OfflineMode)
            raise ConfigError(f"--offline-mode must be one of {names}, got {offline_mode!r}.")
        load = CoserveLoad(
            duration_s=duration,
            warmup_s=warmup,
            rate_per_s=rate,
            cv=cv,
            input_len=LengthRange.parse("--input-len", input_len),
            output_len=LengthRange.parse("--output-len", output_len),
            offline_mode=OfflineMode(offline_mode),
            offline_input_len=LengthRange.parse("--offline-input-len", offline_input_len),
            offline_output_len=LengthRange.parse("--offline-output-len", offline_output_len),
            offline_concurrency=offline_concurrency,
            offline_lines=offline_lines,
            drain_s=drain_timeout,
            ttft_slo_s=ttft_slo,
            tpot_slo_s=tpot_slo,
            seed=seed,
        )
        load.validate()
        if base_url is not None and (policies is not None or server_option):
            raise ConfigError(
                "--base-url is of a server that runs; --policies and --server-option start one."
            )
        plan = _Plan(
            names=(label,) if base_url is not None else _policies(policies or _DEFAULT_POLICIES),
            base_url=None if base_url is None else server_url(base_url),
            model=model,
            load=load,
            options=_server_options(server_option or (), load),
            rounds=rounds,
            start_timeout_s=start_timeout,
            log_dir=log_dir,
            verifies_tls=not insecure,
            shows_progress=not no_progress,
        )
        outcome = _Outcome(load, model or "")
        for path in compare or ():
            outcome.add_earlier(path)
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None
    with interruptible():
        status = plan.execute(outcome)
        try:
            outcome.write(plot=plot, result=result, prints_json=json_output)
        except BackfillError as error:
            typer.echo(f"backfill: {error}", err=True)
            status = status or 1
    if status:
        raise typer.Exit(status)


@dataclass(slots=True)
class _Outcome:
    """What has been measured so far, by policy, and what earlier runs had.

    Args:
        earlier: entries of ``policies`` in earlier results.
        timelines: of the first round of each policy, earlier results' too.
    """

    load: CoserveLoad
    model: str
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: dict[str, list[CoserveFigures]] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def add(self, name: str, run: CoserveRun) -> CoserveFigures:
        from backfill.bench.coserve_figures import figures_of, timeline_of

        figures = figures_of(run)
        self.model = run.model
        self.rounds.setdefault(name, []).append(figures)
        if len(self.rounds[name]) == 1:
            self.timelines[name] = timeline_of(run)
        return figures

    def add_earlier(self, path: Path) -> None:
        """Raises: ConfigError for a file that is no result of this command."""
        from backfill.bench.coserve_figures import Timeline

        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["scenario"] != "coserve":
                raise KeyError("scenario")
            timelines = {name: Timeline(**each) for name, each in content.get("timelines", {}).items()}
            self._check_equal_load(path, content["load"])
            self.earlier |= content["policies"]
            self.timelines |= timelines
        except OSError as error:
            raise ConfigError(f"--compare {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"--compare {path} is no result of bench coserve --result.") from error

    def _check_equal_load(self, path: Path, theirs: Mapping[str, Any]) -> None:
        ours = self.load.as_json()
        differing = [key for key in ours if theirs.get(key) != ours[key] and key != "offline_mode"]
        if differing:
            note(f"--compare {path} is of another load: {', '.join(differing)} differ.")

    def as_json(self) -> dict[str, Any]:
        from backfill.bench.coserve_figures import CoserveFigures, median_figures, policy_json

        known = {each.name for each in dataclasses.fields(CoserveFigures)}
        baselines = {
            name: CoserveFigures(**{key: value for key, value in entry.items() if key in known})
            for name, entry in self.earlier.items()
        }
        baselines |= {name: median_figures(rounds) for name, rounds in self.rounds.items()}
        policies = {name: policy_json(rounds, baselines) for name, rounds in self.rounds.items()}
        for name, entry in self.earlier.items():
            # Its ratios are to the baselines now at hand.
            policies.setdefault(name, {**entry, **_ratios(baselines[name], baselines)})
        return {
            "scenario": "coserve",
            "model": self.model,
            "slo": {"ttft_s": self.load.ttft_slo_s, "tpot_s": self.load.tpot_slo_s},
            "load": self.load.as_json(),
            "policies": policies,
        }

    def write(self, *, plot: Path | None, result: Path | None, prints_json: bool) -> None:
        """Show what there is and keep it. Raises: ConfigError when a file cannot be written."""
        content = self.as_json()
        if content["policies"]:
            _print_table(content["policies"], self._title())
            _explain(content["policies"])
        try:
            if result is not None:
                timelines = {name: dataclasses.asdict(each) for name, each in self.timelines.items()}
                result.write_text(json.dumps({**content, "timelines": timelines}) + "\n", encoding="utf-8")
            if plot is not None and self.timelines:
                from backfill.bench.coserve_plot import save_plot

                save_plot(plot, self.timelines, self.load, self._title())
        except OSError as error:
            path = error.filename or result or plot
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
        finally:
            if prints_json:
                typer.echo(json.dumps(content, allow_nan=False))

    def _title(self) -> str:
        load = self.load
        offline = f"{load.offline_concurrency} offline at once"
        if load.offline_mode in ("batch", "none"):
            offline = {"batch": "a batch", "none": "no offline load"}[load.offline_mode]
        return (
            f"{self.model}: {load.rate_per_s:g} online requests/s of {_range(load.input_len)} in, "
            f"{_range(load.output_len)} out, beside {offline}; {load.duration_s:g} s"
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which servers to load, and how."""

    names: tuple[str, ...]
    base_url: str | None
    model: str | None
    load: CoserveLoad
    options: tuple[str, ...]
    rounds: int
    start_timeout_s: float
    log_dir: Path | None
    verifies_tls: bool
    shows_progress: bool

    def execute(self, outcome: _Outcome) -> int:
        """Run every policy in every round; what was measured is in ``outcome`` however it ends.

        Returns: the command's exit code.
        """
        from backfill.bench.coserve import Status

        status = 0
        try:
            for index in range(self.rounds):
                load = dataclasses.replace(self.load, seed=self.load.seed + index)
                for name in self.names:
                    where = f"round {index + 1} of {self.rounds}, {name}" if self.rounds > 1 else name
                    run = self._run(name, load, where)
                    note(f"{where}: {_in_words(outcome.add(name, run))}")
                    if run.status is Status.INTERRUPTED:
                        return 130
                    status = status if run.status is Status.COMPLETE else 1
        except BackfillError as error:
            typer.echo(f"backfill: {error}", err=True)
            return 1
        except KeyboardInterrupt:
            return 130
        return status

    def _run(self, name: str, load: CoserveLoad, where: str) -> CoserveRun:
        from backfill.bench.coserve import Status
        from backfill.bench.coserve_load import OfflineMode

        if self.base_url is not None:
            return self._load(self.base_url, load, where)
        if name.partition(" ")[0] == "online-only":
            load = dataclasses.replace(load, offline_mode=OfflineMode.NONE)
        with self._server(name) as server:
            note(f"{where}: starting a server")
            server.wait_until_ready(self.start_timeout_s)
            run = self._load(server.url, load, where)
            if run.status is Status.SERVER_LOST:
                _show_log(server, f"The server of {name} ended with status {server.exit_status}.")
            return run

    @contextlib.contextmanager
    def _server(self, name: str) -> Iterator[OwnServer]:
        """A server whose log is shown when it does not start."""
        from backfill.cli.own_server import ServerFailed, own_server

        folder = self.log_dir or Path(tempfile.mkdtemp(prefix="backfill-coserve-"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: {error.strerror or error}.") from error
        policy, *own_options = shlex.split(name)
        slug = "-".join(word.lstrip("-") for word in (policy, *own_options)).replace("/", "_")
        log = folder / f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}.log"
        is_kept = self.log_dir is not None
        options = ("--policy", policy, *self.options, *own_options)
        with own_server(self.model or DEFAULT_MODEL, options, log) as server:
            try:
                yield server
            except ServerFailed as error:
                is_kept = True
                _show_log(server, "")
                raise ConfigError(f"Policy {name}: {error}") from error
            finally:
                is_kept = is_kept or server.exit_status is not None
        if not is_kept:
            log.unlink()
            folder.rmdir()

    def _load(self, url: str, load: CoserveLoad, where: str) -> CoserveRun:
        from rich.console import Console

        from backfill.bench.client import Endpoint
        from backfill.bench.coserve import run_coserve
        from backfill.bench.progress import LiveProgress
        from backfill.bench.runner import Run

        # A server of our own serves one model, under a name of its choice.
        endpoint = Endpoint(
            base_url=url,
            path="/v1/completions",
            model="" if self.base_url is None else self.model or "",
            ignore_eos=True,
            headers=authorization(),
            verifies_tls=self.verifies_tls,
        )

        def watch(run: Run) -> LiveProgress:
            return LiveProgress(run, Console(stderr=True), is_enabled=self.shows_progress)

        async def run() -> CoserveRun:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, stop.set)
            try:
                return await run_coserve(endpoint, load, stop=stop, watch=watch)
            finally:
                loop.remove_signal_handler(signal.SIGINT)

        note(f"{where}: {load.warmup_s:g} s of warm-up and {load.duration_s:g} s of measurement")
        return run_in_loop(run())


def _policies(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = get_args(PolicyName)
    for name in names:
        try:
            policy = shlex.split(name)[0]
        except ValueError as error:
            raise ConfigError(f"--policies {name!r}: {error}.") from error
        if policy not in known:
            raise ConfigError(f"--policies: there is no policy {policy!r}; there are {', '.join(known)}.")
    if not names:
        raise ConfigError(f"--policies names none; there are {', '.join(known)}.")
    return tuple(dict.fromkeys(names))


def _server_options(texts: Any, load: CoserveLoad) -> tuple[str, ...]:
    """The user's come last and win."""
    options = ["--ttft-slo", f"{load.ttft_slo_s:g}", "--tpot-slo", f"{load.tpot_slo_s:g}"]
    options += ["--shutdown-timeout", "5", "--log-level", "WARNING"]
    for text in texts:
        try:
            options += shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"--server-option {text!r}: {error}.") from error
    return tuple(options)


def _ratios(figures: CoserveFigures, baselines: Mapping[str, CoserveFigures]) -> dict[str, float | None]:
    from backfill.bench.coserve_figures import policy_json

    entry = policy_json([figures], baselines)
    return {key: entry[key] for key in ("ttft_p99_over_online_only", "total_tok_s_over_fcfs")}


def _print_table(policies: Mapping[str, Mapping[str, Any]], title: str) -> None:
    from rich.console import Console

    from backfill.cli.tables import print_figures

    columns = {
        name + ("" if figures.get("status") == "complete" else " (partial)"): [
            _cell(figures.get(key), spec) for _, key, spec in _FIGURES
        ]
        for name, figures in policies.items()
    }
    print_figures(Console(), title, [name for name, _, _ in _FIGURES], columns)


def _cell(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _explain(policies: Mapping[str, Mapping[str, Any]]) -> None:
    """What the table's figures do not say by themselves."""
    for name, figures in policies.items():
        if figures.get("status") != "complete":
            measured_s = figures.get("measured_s", 0.0)
            typer.echo(f"{name}: partial results of {measured_s:.0f} s ({figures.get('status')}).")
        if figures.get("unfinished"):
            typer.echo(f"{name}: TTFTs of unfinished requests are lower bounds.")
        if figures.get("tokens_from") == "client":
            typer.echo(f"{name}: offline tokens are of completed requests only; the server counts none.")
        for error, count in (figures.get("errors") or {}).items():
            typer.echo(f"{name}: {count} x {error}")


def _in_words(figures: CoserveFigures) -> str:
    parts = [
        f"{title} {value:.{digits}f} {unit}"
        for title, value, digits, unit in (
            ("TTFT P99", figures.ttft_p99_s, 3, "s"),
            ("ITL P99", figures.itl_p99_s, 3, "s"),
            ("total", figures.total_tok_s, 0, "tokens/s"),
        )
        if value is not None
    ]
    return ", ".join([*parts, figures.status])


def _show_log(server: OwnServer, message: str) -> None:
    for line in server.last_lines(_LOG_LINES):
        typer.echo(f"  {line}", err=True)
    note(f"{message} Its whole log is {server.log}".strip())


def _range(lengths: tuple[int, int]) -> str:
    return f"{lengths[0]}" if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"


app = typer_command("bench coserve", coserve)
