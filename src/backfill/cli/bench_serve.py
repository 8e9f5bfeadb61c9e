"""``backfill bench serve``: put load on an OpenAI-compatible server and measure it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from backfill.cli.bench_options import authorization, check_at_least, note, server_url
from backfill.cli.interrupts import interruptible
from backfill.cli.plots import check_plot
from backfill.cli.startup import run_in_loop
from backfill.cli.typer_command import typer_command
from backfill.core.errors import BackfillError, ConfigError

if TYPE_CHECKING:
    from backfill.bench.client import BenchClient, Endpoint
    from backfill.bench.dataset import ArrivalConfig, DatasetConfig
    from backfill.bench.record import BenchRequest
    from backfill.bench.runner import Run
    from backfill.generation.tokenizer import Tokenizer

_MANY = ("--goodput", "--header", "--metadata")
_SUFFIX_OF_BACKEND = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# A file of each dataset that has one, by its name (docs/benchmarking.md).
_PUBLISHED = {
    "trace": "https://github.com/microsoft/vidur/blob/main/data/processed_traces/splitwise_conv.csv",
    "sharegpt": "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
}
_BACKENDS = {"openai": "openai", "vllm": "openai", "openai-chat": "openai-chat"}


class ManyValuesCommand(TyperCommand):
    """Takes ``--goodput ttft:1000 tpot:50`` as vLLM does, beside repeating the option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _repeat_option(args))


def serve(
    backend: Annotated[
        str, typer.Option(help="openai (completions) or openai-chat; vllm is the same as openai.")
    ] = "openai",
    base_url: Annotated[
        str | None, typer.Option(help="URL of the server, such as http://127.0.0.1:8000.")
    ] = None,
    host: Annotated[str, typer.Option(help="Host, without --base-url.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, without --base-url.")] = 8000,
    endpoint: Annotated[str | None, typer.Option(help="Path. Default: the backend's, under /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="Model. Default: the server's first.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests, where it is not --model.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder, known name or hub id. Default: the root of the server's model."),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, sharegpt (JSON, or a CSV of lengths) or trace (CSV or JSONL).")
    ] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="File of sharegpt and trace.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 1000,
    input_len: Annotated[int | None, typer.Option(help="The same as --random-input-len.")] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Output tokens of every request, whatever the dataset.")
    ] = None,
    random_input_len: Annotated[int, typer.Option(help="Mean tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Mean output tokens with random prompts.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Random lengths lie within mean * (1 ± ratio), uniformly.")
    ] = 0.0,
    random_length_law: Annotated[
        str, typer.Option(help="uniform, normal or lognormal lengths; the last two with --random-length-cv.")
    ] = "uniform",
    random_length_cv: Annotated[
        float | None, typer.Option(help="Standard deviation of random lengths divided by their mean.")
    ] = None,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens in front of every random prompt, the same for all.")
    ] = 0,
    max_total_len: Annotated[
        int | None, typer.Option(help="Leave out requests of a dataset with more tokens, output included.")
    ] = None,
    trace_seconds_per_unit: Annotated[
        float, typer.Option(help="Unit of the times in a JSONL trace; Mooncake's is the millisecond.")
    ] = 0.001,
    trace_hash_block_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that one of a JSONL trace's hash_ids stands for.")
    ] = 512,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second; inf sends all at once, or a trace at its own times.")
    ] = math.inf,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of the gamma-distributed gaps: 1 Poisson (default), below burstier."),
    ] = None,
    cv: Annotated[
        float | None, typer.Option(help="The same as a coefficient of variation: burstiness = 1/cv².")
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(help="ON/OFF load: seconds:rate of each phase, repeated, such as 30:4,60:0."),
    ] = None,
    ramp_up_strategy: Annotated[
        str | None, typer.Option(help="linear or exponential change of the rate over the requests.")
    ] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="Rate at the first request.")] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="Rate at the last request.")] = None,
    self_timed: Annotated[
        bool,
        typer.Option(
            "--self-timed/--no-self-timed", help="Keep a trace's times, stretched to --request-rate."
        ),
    ] = True,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests at the server at once; others wait in the client.")
    ] = None,
    probe_request_rate: Annotated[
        float, typer.Option(help="One-token requests per second beside the load and past its limit.")
    ] = 0.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Objectives in ms, such as ttft:1000 tpot:50; also itl (worst gap), e2el."),
    ] = None,
    ttft_slo: Annotated[float | None, typer.Option(help="The same as --goodput ttft:MS.")] = None,
    tpot_slo: Annotated[float | None, typer.Option(help="The same as --goodput tpot:MS.")] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Shown: of ttft, tpot, itl, e2el, normalized_latency, client_queue_time.")
    ] = "ttft,tpot,itl,e2el,normalized_latency",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, separated by commas.")] = "50,90,99",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate to the full length (vLLM's and our extension).")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Of every request. Default: the server's.")
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(help='More fields of every request as JSON: {"priority": 1}.')
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="More headers, KEY=VALUE.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not verify the server's certificate.")
    ] = False,
    request_timeout_sec: Annotated[
        float, typer.Option(help="Seconds after which a request counts as failed.")
    ] = 21_600.0,
    seed: Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")] = 0,
    num_warmups: Annotated[int, typer.Option(help="Requests sent before, not measured.")] = 0,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(help="Wait so long until one request succeeds; 0 does not send it.")
    ] = 0.0,
    disable_tqdm: Annotated[
        bool, typer.Option("--disable-tqdm", "--no-progress", help="No live display.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON too, as the last line.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG report to this file.")] = None,
    label: Annotated[str | None, typer.Option(help="Prefix of the result's file name.")] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Save the result as a JSON file.")
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With every request's times, text and error.")
    ] = False,
    append_result: Annotated[
        bool, typer.Option("--append-result", help="Append it as a line to an existing file.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of the result.")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(help="Default: LABEL-RATEqps-MODEL-DATE.json.")
    ] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE to keep in the result.")] = None,
) -> None:
    """Send requests to an OpenAI-compatible server as they would arrive, and report its latencies.

    The API key is taken from OPENAI_API_KEY. Ctrl-C ends the run and keeps what was measured. Exit code 0
    if a request completed, 1 if none did, 130 after Ctrl-C.
    """
    try:
        from backfill.bench.client import Endpoint
        from backfill.bench.metrics import parse_objectives

        check_at_least(("--max-concurrency", max_concurrency, 1), ("--num-warmups", num_warmups, 0))
        check_at_least(("--probe-request-rate", probe_request_rate, 0))
        check_at_least(("--ready-check-timeout-sec", ready_check_timeout_sec, 0))
        if not request_timeout_sec > 0:
            raise ConfigError(f"--request-timeout-sec must be above 0, got {request_timeout_sec:g}.")
        kind = _of("--backend", backend, _BACKENDS)
        body = _json_object("--extra-body", extra_body)
        target = Endpoint(
            base_url=_base_url(base_url, host, port),
            path=endpoint or _SUFFIX_OF_BACKEND[kind],
            model=served_model_name or model or "",
            is_chat=kind == "openai-chat",
            ignore_eos=ignore_eos,
            body=body if temperature is None else {"temperature": temperature, **body},
            headers=authorization() | _pairs("--header", header),
            timeout_s=request_timeout_sec,
            verifies_tls=not insecure,
        )
        objectives = parse_objectives(goodput or (), "--goodput")
        for option, name, bound_ms in (("--ttft-slo", "ttft", ttft_slo), ("--tpot-slo", "tpot", tpot_slo)):
            if bound_ms is not None:
                objectives |= parse_objectives([f"{name}:{bound_ms}"], option)
        plan = _Plan(
            endpoint=target,
            tokenizer=tokenizer or model,
            is_tokenizer_required=tokenizer is not None,
            dataset=_dataset(
                dataset_name,
                dataset_path,
                num_prompts,
                seed,
                (input_len or random_input_len, output_len or random_output_len),
                (random_length_law, random_range_ratio, random_length_cv),
                output_len,
                random_prefix_len,
                max_total_len,
                trace_seconds_per_unit,
                trace_hash_block_tokens,
            ),
            arrival=_arrival(
                request_rate,
                burstiness,
                cv,
                phases,
                (ramp_up_strategy, ramp_up_start_rps, ramp_up_end_rps),
                self_timed,
            ),
            max_concurrency=max_concurrency,
            probe_rate_per_s=probe_request_rate,
            num_warmups=num_warmups,
            ready_timeout_s=ready_check_timeout_sec,
            shows_progress=not disable_tqdm,
        )
        output = _Output(
            objectives=objectives,
            shown=_names(percentile_metrics),
            percentiles=_percentiles(metric_percentiles),
            prints_json=json_output,
            plot=plot,
            is_saved=save_result or append_result,
            is_detailed=save_detailed,
            is_appended=append_result,
            folder=result_dir,
            filename=result_filename,
            label=label or backend,
            metadata=_pairs("--metadata", metadata),
        )
        output.check_writable()
        with interruptible():
            run, settings = run_in_loop(plan.execute())
            num_completed = output.write(run, settings)
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None
    if run.is_interrupted:
        raise typer.Exit(130)
    if num_completed == 0:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about what to send."""

    endpoint: Endpoint
    tokenizer: str | None
    is_tokenizer_required: bool
    dataset: DatasetConfig
    arrival: ArrivalConfig
    max_concurrency: int | None
    probe_rate_per_s: float
    num_warmups: int
    ready_timeout_s: float
    shows_progress: bool

    async def execute(self) -> tuple[Run, dict[str, Any]]:
        """Run it. Returns the run and its settings, as the result file keeps them."""
        import dataclasses

        from backfill.bench.client import BenchClient
        from backfill.bench.runner import wait_until_ready, warm_up

        # What needs no server is checked before anybody waits for one.
        self.dataset.validate()
        _check_dataset(self.dataset)
        self.arrival.validate()
        entry = await self._served_model()
        name = self.endpoint.model or str(entry.get("id", ""))
        if not name:
            raise ConfigError(f"{self.endpoint.base_url}/v1/models names no model; give --model.")
        tokenizer = self._load_tokenizer(entry)
        requests = self._build(tokenizer, entry)
        endpoint = dataclasses.replace(self.endpoint, model=name)
        count = (
            None if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        )
        async with BenchClient(endpoint, count) as client:
            if self.ready_timeout_s > 0:
                await wait_until_ready(client, requests[0], self.ready_timeout_s)
            if self.num_warmups:
                # The first only: a server that keeps prefixes must not know the others beforehand.
                await warm_up(client, [requests[0]] * self.num_warmups, self.max_concurrency)
            run = await self._send(client, requests)
        return run, self._settings(name, requests)

    async def _send(self, client: BenchClient, requests: Sequence[BenchRequest]) -> Run:
        from rich.console import Console

        from backfill.bench.progress import LiveProgress
        from backfill.bench.runner import new_run, send_load

        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        run = new_run(len(requests))
        try:
            async with LiveProgress(run, Console(stderr=True), is_enabled=self.shows_progress):
                return await send_load(
                    client,
                    requests,
                    stop=stop,
                    run=run,
                    max_concurrency=self.max_concurrency,
                    probe_rate_per_s=self.probe_rate_per_s,
                )
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _served_model(self) -> dict[str, Any]:
        """The server's entry of the model, or of its first; waits for the server as long as allowed."""
        from backfill.bench.client import BenchClient

        deadline_at = time.monotonic() + self.ready_timeout_s
        async with BenchClient(self.endpoint) as client:
            while True:
                try:
                    entries = await client.get_models()
                    break
                except ConfigError:
                    if time.monotonic() >= deadline_at:
                        raise
                    await asyncio.sleep(1.0)
        named = [entry for entry in entries if entry["id"] == self.endpoint.model]
        return next(iter(named or entries), {})

    def _load_tokenizer(self, entry: dict[str, Any]) -> Tokenizer | None:
        """The tokenizer asked for, or that of the served model if it is at hand."""
        for name in filter(None, (self.tokenizer, entry.get("root"))):
            try:
                return load_tokenizer(str(name))
            except BackfillError:
                if self.is_tokenizer_required:
                    raise
        return None

    def _build(self, tokenizer: Tokenizer | None, entry: dict[str, Any]) -> list[BenchRequest]:
        from backfill.bench.dataset import build_requests

        requests = build_requests(
            self.dataset,
            self.arrival,
            tokenizer=tokenizer,
            vocabulary_size=None if tokenizer is None else tokenizer.backend.get_vocab_size(),
            as_text=self.endpoint.is_chat,
        )
        limit = entry.get("max_model_len")
        if isinstance(limit, int):
            too_long = sum(r.input_tokens + r.output_tokens > limit for r in requests)
            if too_long:
                note(f"{too_long} of {len(requests)} requests exceed the server's context of {limit} tokens.")
        if len(requests) < self.dataset.num_prompts:
            note(f"the trace has only {len(requests)} requests to send.")
        return requests

    def _settings(self, model: str, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        import numpy as np

        from backfill.workloads.arrivals import gap_cv, mean_rate_per_s

        instants = np.array([request.due_at_s for request in requests])
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": "openai-chat" if self.endpoint.is_chat else "openai",
            "base_url": self.endpoint.base_url,
            "model_id": model,
            "tokenizer_id": self.tokenizer,
            "dataset_name": str(self.dataset.name),
            "num_prompts": len(requests),
            "request_rate": self.arrival.rate_per_s,
            "burstiness": self.arrival.burstiness,
            "phases": [[phase.duration_s, phase.rate_per_s] for phase in self.arrival.phases] or None,
            "ramp": None if self.arrival.ramp is None else list(self.arrival.ramp),
            "max_concurrency": self.max_concurrency,
            "seed": self.dataset.seed,
            "offered_rate": mean_rate_per_s(instants),
            "offered_cv": gap_cv(instants),
        }


@dataclass(frozen=True, slots=True)
class _Output:
    """Everything about what to show and keep."""

    objectives: dict[str, float]
    shown: tuple[str, ...]
    percentiles: tuple[float, ...]
    prints_json: bool
    plot: Path | None
    is_saved: bool
    is_detailed: bool
    is_appended: bool
    folder: Path
    filename: str | None
    label: str
    metadata: dict[str, str]

    def check_writable(self) -> None:
        """Raises: ConfigError now for what would otherwise lose the result after the run."""
        check_plot(self.plot)
        if not self.is_saved:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--result-dir {self.folder}: {error.strerror or error}.") from error
        if not os.access(self.folder, os.W_OK):
            raise ConfigError(f"--result-dir {self.folder} cannot be written to.")

    def write(self, run: Run, settings: dict[str, Any]) -> int:
        """Print and save the result. Returns the number of completed requests."""
        from backfill.bench.metrics import compute_metrics
        from backfill.bench.report import format_report, json_line, result_json

        metrics = compute_metrics(
            run.records,
            duration_s=run.duration_s,
            num_requests=run.num_requests,
            objectives_s=self.objectives,
            percentiles=self.percentiles,
        )
        settings = {**settings, "label": self.label, **self.metadata}
        typer.echo(format_report(metrics, self.shown, settings))
        if run.is_interrupted:
            typer.echo("Interrupted: these are partial results.")
        result = result_json(metrics, run, settings)
        if self.is_saved:
            self._save(result_json(metrics, run, settings, is_detailed=self.is_detailed))
        if self.plot is not None:
            from backfill.bench.plot import save_plot

            save_plot(self.plot, run.records, f"{settings['model_id']}, {len(run.records)} requests")
        if self.prints_json:
            typer.echo(json_line(result))
        return metrics.num_completed

    def _save(self, result: dict[str, Any]) -> None:
        from backfill.bench.report import json_line

        model = str(result["model_id"]).rsplit("/", maxsplit=1)[-1]
        default = f"{self.label}-{result['request_rate']}qps-{model}-{result['date']}.json"
        path = self.folder / (self.filename or default)
        try:
            with path.open("a" if self.is_appended else "w", encoding="utf-8") as file:
                file.write(json_line(result) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
        note(f"result saved to {path}")


def load_tokenizer(name: str) -> Tokenizer:
    """Tokenizer of a folder, a known name or a hub id.

    Raises: ModelError when there is none to read.
    """
    from backfill.core.errors import ModelError
    from backfill.generation.tokenizer import Tokenizer
    from backfill.models.resolve import KNOWN_MODELS, resolve_model

    if name in KNOWN_MODELS:
        return Tokenizer.from_folder(resolve_model(name))
    if Path(name).is_dir():
        return Tokenizer.from_folder(Path(name))
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(name))
    except Exception as error:  # the library raises many kinds
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"The tokenizer {name!r} cannot be loaded: {reason}") from error


def _check_dataset(dataset: DatasetConfig) -> None:
    """Raises: ConfigError that says where such a file is published."""
    source = _PUBLISHED.get(dataset.name)
    if source is not None and dataset.path is not None and not dataset.path.exists():
        raise ConfigError(
            f"--dataset-path {dataset.path} cannot be read: there is no such file. One is {source}."
        )


def _dataset(
    name: str,
    path: Path | None,
    num_prompts: int,
    seed: int,
    lengths: tuple[int, int],
    law: tuple[str, float, float | None],
    fixed_output_len: int | None,
    prefix_tokens: int,
    max_total_tokens: int | None,
    seconds_per_unit: float,
    hash_block_tokens: int,
) -> DatasetConfig:
    from backfill.bench.dataset import DatasetConfig, DatasetName
    from backfill.workloads.lengths import LengthDistribution, LengthLaw

    law_name, range_ratio, length_cv = law
    family = LengthLaw(_of("--random-length-law", law_name, {str(each): str(each) for each in LengthLaw}))
    if (length_cv is not None) == (family is LengthLaw.UNIFORM):
        raise ConfigError(
            "--random-length-cv goes with --random-length-law normal or lognormal, and only then."
        )
    spread = range_ratio if length_cv is None else length_cv
    return DatasetConfig(
        name=DatasetName(_of("--dataset-name", name, {str(each): str(each) for each in DatasetName})),
        path=path,
        num_prompts=num_prompts,
        input_len=LengthDistribution(lengths[0], spread, family),
        output_len=LengthDistribution(lengths[1], spread, family),
        fixed_output_len=fixed_output_len,
        prefix_tokens=prefix_tokens,
        max_total_tokens=max_total_tokens,
        seconds_per_unit=seconds_per_unit,
        hash_block_tokens=hash_block_tokens,
        seed=seed,
    )


def _arrival(
    rate_per_s: float,
    burstiness: float | None,
    cv: float | None,
    phases: str | None,
    ramp: tuple[str | None, float | None, float | None],
    is_self_timed: bool,
) -> ArrivalConfig:
    from backfill.bench.dataset import ArrivalConfig
    from backfill.workloads.arrivals import burstiness_of_cv

    if burstiness is not None and cv is not None:
        raise ConfigError("--burstiness and --cv say the same; give one of them.")
    shape = burstiness_of_cv(cv) if cv is not None else 1.0 if burstiness is None else burstiness
    strategy, start_per_s, end_per_s = ramp
    if strategy is not None:
        _of("--ramp-up-strategy", strategy, {"linear": "linear", "exponential": "exponential"})
    has_rates = (start_per_s is not None, end_per_s is not None)
    if has_rates != (strategy is not None,) * 2:
        raise ConfigError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together.")
    return ArrivalConfig(
        rate_per_s=rate_per_s,
        burstiness=shape,
        phases=() if phases is None else _phases(phases),
        ramp=None if start_per_s is None or end_per_s is None else (start_per_s, end_per_s),
        is_ramp_exponential=strategy == "exponential",
        is_self_timed=is_self_timed,
    )


def _phases(text: str) -> Any:
    from backfill.workloads.arrivals import Phase

    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple(Phase(float(duration), float(rate)) for duration, rate in pairs)
    except ValueError:
        raise ConfigError(f"--phases takes SECONDS:RATE,SECONDS:RATE,..., got {text!r}.") from None


def _repeat_option(arguments: Iterable[str]) -> list[str]:
    """``--goodput a b`` as ``--goodput a --goodput b``, for the options that take several values."""
    result: list[str] = []
    option, num_values = "", 0
    for argument in arguments:
        if argument.startswith("-"):
            option, num_values = argument if argument in _MANY else "", 0
        elif option:
            num_values += 1
            if num_values > 1:
                result.append(option)
        result.append(argument)
    return result


def _base_url(base_url: str | None, host: str, port: int) -> str:
    if base_url is None:
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return server_url(base_url)


def _pairs(option: str, texts: Iterable[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise ConfigError(f"{option} takes KEY=VALUE, got {text!r}.")
        pairs[name] = value
    return pairs


def _json_object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} must be a JSON object: {error.msg} at character {error.pos}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, got {text}.")
    return value


def _names(text: str) -> tuple[str, ...]:
    from backfill.bench.report import TITLES

    return tuple(
        _of("--percentile-metrics", name.strip(), {title: title for title in TITLES})
        for name in text.split(",")
    )


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(
            f"--metric-percentiles takes numbers from 0 to 100, such as 50,90,99, got {text!r}."
        )
    return tuple(values)


def _of(option: str, value: str, allowed: dict[str, str]) -> str:
    if value not in allowed:
        raise ConfigError(f"{option} must be one of {', '.join(allowed)}, got {value!r}.")
    return allowed[value]


app = typer_command("bench serve", serve, cls=ManyValuesCommand)
