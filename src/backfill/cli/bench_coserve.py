"""``backfill bench coserve``: online load beside offline load on real servers, policy by policy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from backfill.bench.client import Endpoint, authorization, parse_base_url
from backfill.bench.coserve import CoserveRun, Status, run_coserve
from backfill.bench.coserve_figures import CoserveFigures
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.coserve_result import CoserveResult
from backfill.bench.runner import stopped_by_ctrl_c
from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.live import live_progress, note
from backfill.cli.own_server import OwnServer, ServerFailed, own_server, server_environment
from backfill.cli.startup import check_folder, check_plot, run_in_loop
from backfill.core.config import PolicyName
from backfill.core.errors import ConfigError
from backfill.core.options import bounded, check_types
from backfill.execution.machine import stolen_s
from backfill.models.resolve import DEFAULT_MODEL
from backfill.simulation.study import check_names
from backfill.simulation.tables import print_figures

_DEFAULT_POLICIES = "online-only,fcfs,priority,slo"
_PREFIX = "BACKFILL_BENCH_"
_LOG_LINES = 15
_LEAST_FOR_P99 = 100  # first tokens
_LEAST_IN_TIME = 0.9  # of first tokens without offline load, else its rate is too high

_FIGURES = (
    "ttft_p50_s ttft_p99_s ttft_p99_over_online_only itl_p50_s itl_p99_s ttft_attainment itl_attainment "
    "total_tok_s total_tok_s_over_fcfs online_tok_s offline_tok_s recomputed_token_share "
    "restored_token_share discarded_token_share failed unfinished"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The servers to load.

    Attributes:
        policies: policies to start a server for, one after another, separated by commas. Each may have
            options of its own, as in "slo,slo --checkpointing none". Default:
            online-only,fcfs,priority,slo.
        base_url: URL of a running server to load instead, ours or another OpenAI-compatible one.
        label: name of the server at `base_url` in the result.
        model: model to serve, or of the server at `base_url`. Default: smollm2-135m-instruct, or the first of
            that server.
        server_option: more options of the servers started here, such as "--threads 2"; repeatable.
        rounds: how often to go through the policies; figures are medians.
        start_timeout: seconds a server may take to start.
        log_dir: folder of the servers' logs. By default only the log of a failed server is kept.
        insecure: do not verify the server's certificate.
    """

    policies: str | None = None
    base_url: str | None = None
    label: str = "server"
    model: str | None = None
    server_option: tuple[str, ...] = ()
    rounds: int = bounded(1, least=1)
    start_timeout: float = bounded(600.0, above=0)
    log_dir: Path | None = None
    insecure: bool = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if self.base_url is not None:
            parse_base_url(self.base_url)
            if self.policies is not None or self.server_option:
                raise ConfigError(
                    "`base_url` is of a server that runs; `policies` and `server_option` start one."
                )
        self.names()
        self.extra_options()

    def names(self) -> tuple[str, ...]:
        """The policies with their options, or the label of the running server. Raises: ConfigError."""
        if self.base_url is not None:
            return (self.label,)
        texts = (_DEFAULT_POLICIES if self.policies is None else self.policies).split(",")
        names = [text.strip() for text in texts if text.strip()]
        check_names("policies", [_split("policies", name)[0] for name in names], get_args(PolicyName))
        return tuple(dict.fromkeys(names))

    def extra_options(self) -> list[str]:
        """Raises: ConfigError for an option with an open quote, or one that is set here."""
        words = [word for text in self.server_option for word in _split("server_option", text)]
        for word in words:
            if word.partition("=")[0] in ("--host", "--port", "--api-key", "--api-key-file"):
                raise ConfigError(f"`server_option` {word} is set by this command.")
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """What is shown and kept.

    Attributes:
        compare: result of an earlier run to show beside this one; repeatable.
        result: write the result with its timelines as JSON to this file, for `compare`.
        plot: write a PNG timeline to this file.
        json: print the result as JSON too, as the last line.
        no_progress: no live display.
    """

    compare: tuple[Path, ...] = ()
    result: Path | None = None
    plot: Path | None = None
    json: bool = False
    no_progress: bool = False


def coserve(servers: ServerOptions, load: CoserveLoad, output: ResultOptions) -> None:
    """Load servers with online and offline requests at once and compare their policies.

    By default starts one server per policy, one after the other. Every policy gets the same online requests
    at the same times; online-only gets no offline ones. The API key is taken from OPENAI_API_KEY. Exit
    status: 0 if everything was measured, 1 if not, 130 after Ctrl-C; what was measured is shown in any case.
    """
    check_plot(output.plot)
    check_folder("result", output.result)
    unused = {name for name in os.environ.keys() - server_environment() if not name.startswith(_PREFIX)}
    if servers.base_url is None and unused:
        note(f"Not used, as servers take options from --server-option here: {', '.join(sorted(unused))}")
    result = CoserveResult(load, servers.model or "")
    for path in output.compare:
        if differing := result.add_earlier(path):
            note(f"--compare {path} is of another load: {', '.join(differing)} differ.")
    with interruptible():
        try:
            status = _run_rounds(servers, load, result, output.no_progress)
        except KeyboardInterrupt:
            status = 130
        finally:
            is_saved = _show(result, output)
    if status or not is_saved:
        raise SystemExit(status or 1)


app = command(
    coserve,
    {
        "Servers": "policies base_url label model server_option rounds start_timeout log_dir insecure",
        "Online load": "duration warmup rate cv input_len output_len ttft_slo tpot_slo drain_timeout seed",
        "Offline load": "offline_mode offline_input_len offline_output_len offline_concurrency offline_lines",
        "Output": "compare result plot json no_progress",
    },
    prefix=_PREFIX,
)


def _run_rounds(servers: ServerOptions, load: CoserveLoad, result: CoserveResult, is_silent: bool) -> int:
    """Run every policy in every round, and add each run to ``result``.

    Returns: the command's exit status.
    Raises: BackfillError when a server does not start or refuses the load.
    """
    status = 0
    for index in range(servers.rounds):
        seeded = dataclasses.replace(load, seed=load.seed + index)
        for name in servers.names():
            title = f"round {index + 1} of {servers.rounds}, {name}" if servers.rounds > 1 else name
            run = _run_policy(servers, name, seeded, title, is_silent)
            note(f"{title}: {_in_words(result.add(name, run))}")
            if run.status is Status.INTERRUPTED:
                return 130
            if run.status is not Status.COMPLETE:
                status = 1
    return status


def _run_policy(
    servers: ServerOptions, name: str, load: CoserveLoad, title: str, is_silent: bool
) -> CoserveRun:
    if servers.base_url is not None:
        return _run_on(parse_base_url(servers.base_url), servers, load, title, is_silent)
    if name.partition(" ")[0] == "online-only":
        load = dataclasses.replace(load, offline_mode="none")
    with _logged_server(servers, name, load) as server:
        note(f"{title}: starting a server")
        server.wait_until_ready(servers.start_timeout)
        run = _run_on(server.url, servers, load, title, is_silent)
        if run.status is Status.SERVER_LOST:
            _show_log(server, f"The server of {name} ended with status {server.exit_status}.")
        return run


@contextlib.contextmanager
def _logged_server(servers: ServerOptions, name: str, load: CoserveLoad) -> Iterator[OwnServer]:
    """A server of a policy. Its log is shown if it does not start."""
    folder = servers.log_dir or Path(tempfile.mkdtemp(prefix="backfill-coserve-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`log_dir` {folder}: {error.strerror or error}.") from error
    policy, *own_options = shlex.split(name)
    slug = "-".join(word.lstrip("-") for word in (policy, *own_options)).replace("/", "_")
    log = folder / f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    is_kept = servers.log_dir is not None
    options = ["--policy", policy, "--ttft-slo", f"{load.ttft_slo:g}", "--tpot-slo", f"{load.tpot_slo:g}"]
    options += ["--shutdown-timeout", "5", "--log-level", "WARNING"]
    options += [*servers.extra_options(), *own_options]  # the last one of an option counts
    with own_server(servers.model or DEFAULT_MODEL, options, log) as server:
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


def _run_on(url: str, servers: ServerOptions, load: CoserveLoad, title: str, is_silent: bool) -> CoserveRun:
    endpoint = Endpoint(
        base_url=url,
        path="/v1/completions",
        # A server started here names its model itself.
        model="" if servers.base_url is None else servers.model or "",
        ignore_eos=True,
        headers=authorization(),
        verifies_tls=not servers.insecure,
    )

    async def run() -> CoserveRun:
        with stopped_by_ctrl_c() as stop:
            return await run_coserve(
                endpoint,
                load,
                stop=stop,
                watch=lambda online: live_progress(online, is_silent),
                stolen_s=stolen_s if servers.base_url is None else lambda: 0.0,  # that one may be elsewhere
            )

    note(f"{title}: {load.warmup:g} s of warm-up and {load.duration:g} s of measurement")
    return run_in_loop(run())


def _split(field: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"`{field}` {text!r}: {error}.") from error


def _show(result: CoserveResult, output: ResultOptions) -> bool:
    """Print the result and write its files. Returns: whether all files were written."""
    content = result.as_json()
    if content["policies"]:
        columns = {
            name + ("" if figures.get("status") == "complete" else " (partial)"): figures
            for name, figures in content["policies"].items()
        }
        print_figures(Console(), result.title, _FIGURES, columns)
        _explain(content["policies"])
    is_saved = True
    try:
        result.save(output.result, output.plot)
    except ConfigError as error:
        note(str(error))
        is_saved = False
    if output.json:
        print(json.dumps(content, allow_nan=False))
    return is_saved


def _explain(policies: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what limits the table's figures, and errors."""
    for name, figures in policies.items():
        if figures.get("status") != "complete":
            measured_s = figures.get("measured_s", 0.0)
            print(f"{name}: partial results of {measured_s:.0f} s ({figures.get('status')}).")
        in_time = figures.get("ttft_attainment")
        if name.partition(" ")[0] == "online-only" and in_time is not None and in_time < _LEAST_IN_TIME:
            print(
                f"{name}: the online load alone is beyond this server's capacity: {in_time:.0%} of first "
                "tokens were in time. Lower --rate: policies are compared under overload."
            )
        if figures.get("num_left_out"):
            print(
                f"{name}: a hypervisor took much of {figures['left_out_s']:.0f} s: what falls into these is "
                f"left out, first tokens of {figures['num_left_out']} of {figures['num_online']} requests."
            )
        num_online = min(_num_counted(each) for each in figures.get("rounds") or [figures])
        if 0 < num_online < _LEAST_FOR_P99:
            print(
                f"{name}: the TTFT's P99 of {num_online} requests is about the longest: a longer --duration "
                "has more of them."
            )
        if figures.get("unfinished"):
            print(f"{name}: TTFTs of unfinished requests are lower bounds.")
        if figures.get("tokens_from") == "client":
            print(f"{name}: offline tokens are of completed requests only; the server counts none.")
        for error, count in (figures.get("errors") or {}).items():
            print(f"{name}: {count} x {error}")


def _num_counted(figures: Mapping[str, Any]) -> int:
    """Online requests that its latencies are of."""
    num_online: int = figures.get("num_online") or 0
    return num_online - (figures.get("num_left_out") or 0)


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
        print(f"  {line}", file=sys.stderr)
    note(f"{message} Its whole log is {server.log}".strip())
