"""``backfill serve``: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backfill.cli import engine_options as engine
from backfill.cli.engine_options import ENGINE_DEFAULTS, LIMITS
from backfill.cli.interrupts import LOADING, exit_after, interruptible, take_from_loop
from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import BackfillError, ConfigError
from backfill.engine.options import EngineOptions, check_profile, uses_generation_config
from backfill.generation.chat_template import read_template
from backfill.jobs.config import JobsConfig
from backfill.jobs.lock import DataFolderLock
from backfill.jobs.private_files import make_folder, write_durably
from backfill.models.resolve import DEFAULT_MODEL

if TYPE_CHECKING:
    from backfill.execution.executor import ExecutorInfo

_JOBS_DEFAULTS = JobsConfig(data_dir=Path())
_TINY_CONTEXT = 128


def serve(
    model: Annotated[str, typer.Argument(help=engine.MODEL_HELP)] = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    served_model_name: engine.ServedModelName = None,
    data_dir: Annotated[
        Path,
        typer.Option(
            help="Folder for what the server itself keeps: configuration, files, batches.",
            envvar="BACKFILL_DATA_DIR",
        ),
    ] = Path("~/.local/share/backfill"),
    revision: engine.Revision = None,
    device: engine.Device = "auto",
    dtype: engine.DType = "auto",
    load_format: engine.LoadFormat = "auto",
    max_model_len: engine.MaxModelLen = None,
    max_num_seqs: engine.MaxNumSeqs = LIMITS.max_num_seqs,
    max_num_batched_tokens: engine.MaxNumBatchedTokens = LIMITS.max_num_batched_tokens,
    max_prefill_chunk_tokens: engine.MaxPrefillChunkTokens = LIMITS.max_prefill_chunk_tokens,
    block_size: engine.BlockSize = ENGINE_DEFAULTS.block_size,
    kv_gib: engine.KvGib = None,
    gpu_memory_utilization: engine.GpuMemoryUtilization = ENGINE_DEFAULTS.gpu_memory_utilization,
    threads: engine.Threads = None,
    policy: engine.Policy = "slo",
    ttft_slo: engine.TtftSlo = None,
    tpot_slo: engine.TpotSlo = None,
    profile: engine.Profile = None,
    preemption: engine.Preemption = LIMITS.preemption,
    host_kv_gib: engine.HostKvGib = None,
    checkpointing: engine.Checkpointing = None,
    kv_restore: engine.KvRestore = LIMITS.restore,
    victims: engine.Victims = LIMITS.victims,
    promote_before: engine.PromoteBefore = LIMITS.promote_before_s,
    engine_hang_timeout: engine.EngineHangTimeout = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Online requests accepted beyond --max-num-seqs; more get HTTP 429.")
    ] = 1024,
    max_queued_offline_requests: Annotated[
        int, typer.Option(help="Requests of service_tier flex accepted at once; more get HTTP 429.")
    ] = 1024,
    shed_hopeless: Annotated[
        bool,
        typer.Option(
            "--shed-hopeless",
            help="Refuse online requests whose first token would come more than twice as late as their "
            "objective, with HTTP 429.",
        ),
    ] = False,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            help="Larger JSON bodies get HTTP 413, and a batch with a longer line fails; uploads have limits "
            "of their own."
        ),
    ] = 4 << 20,
    max_inflight_body_bytes: Annotated[
        int, typer.Option(help="Bytes of all JSON bodies being read or prepared; beyond, HTTP 503.")
    ] = 256 << 20,
    max_response_tokens: Annotated[
        int, typer.Option(help="Choices x max_tokens x (1 + logprobs) of one request; more get HTTP 400.")
    ] = 1 << 20,
    max_connections: Annotated[
        int | None,
        typer.Option(help="Connections open at once. Default: what open files allow, at most 8192."),
    ] = None,
    head_timeout: Annotated[
        float, typer.Option(help="Seconds that a request's head may take; then HTTP 408.")
    ] = 10.0,
    body_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a request's body may pause, ten times as many for all of it; then HTTP 408."
        ),
    ] = 30.0,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds that a client may take nothing of its answer; then it is aborted.")
    ] = 30.0,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Further Host that requests may name, where it is checked: on loopback without an API key. "
            "Repeatable; * allows any."
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may use the server (CORS), such as https://app.example. "
            "Repeatable; * allows any."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]KEY",
            help="Key clients must send; repeatable. Files and batches belong to NAME, which may have "
            "several keys, or to the KEY itself. Without a name, a KEY with an '=' within is written =KEY.",
            envvar="BACKFILL_API_KEY",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with lines NAME=KEY, read again when it changes.", envvar="BACKFILL_API_KEY_FILE"
        ),
    ] = None,
    strict: engine.Strict = False,
    chat_template: engine.ChatTemplate = None,
    generation_config: engine.GenerationConfig = "auto",
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to end after a signal.")
    ] = 30.0,
    sse_keep_alive_interval: Annotated[
        float, typer.Option(help="Seconds between comments on a silent stream; 0 sends none.")
    ] = 0.0,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Also expose the core metrics under vllm: names.")
    ] = False,
    batch_api: Annotated[
        bool, typer.Option("--batch-api/--no-batch-api", help="Serve /v1/files and /v1/batches.")
    ] = True,
    batch_database_url: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL of the job store. Default: SQLite in the data folder.",
            envvar="BACKFILL_BATCH_DATABASE_URL",
        ),
    ] = None,
    batch_max_lines: Annotated[
        int, typer.Option(help="Lines in one batch; a file with more fails validation.")
    ] = _JOBS_DEFAULTS.max_lines,
    batch_max_bytes: Annotated[
        int, typer.Option(help="Bytes of one batch's input file; larger ones get HTTP 413.")
    ] = _JOBS_DEFAULTS.max_batch_bytes,
    batch_max_storage_gib: Annotated[
        float | None, typer.Option(help="GiB of all stored files together. Default: no limit.")
    ] = None,
    batch_max_owner_gib: Annotated[
        float | None, typer.Option(help="GiB of one API key's files together. Default: no limit.")
    ] = None,
    batch_min_free_gib: Annotated[
        float, typer.Option(help="GiB of the disk kept for results; below, uploads and batches are refused.")
    ] = _JOBS_DEFAULTS.min_free_bytes / GIB,
    batch_max_uploads: Annotated[
        int, typer.Option(help="Uploads open at once, a quarter of them one API key's; more get HTTP 429.")
    ] = _JOBS_DEFAULTS.max_uploads,
    batch_max_open: Annotated[
        int, typer.Option(help="Open batches of one API key; more get HTTP 429.")
    ] = _JOBS_DEFAULTS.max_open_batches,
    batch_max_queued_lines: Annotated[
        int, typer.Option(help="Unfinished lines of one API key's open batches together.")
    ] = _JOBS_DEFAULTS.max_queued_lines,
    batch_retention_hours: Annotated[
        float, typer.Option(help="Hours after which input and result files are deleted.")
    ] = _JOBS_DEFAULTS.retention_s / 3600,
    log_level: engine.LogLevel = "INFO",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API. Fetches and converts the model first, where needed.

    Exit status: 0 ended by a signal; 1 it cannot serve, or not any more, or a second signal ended it at
    once; 130 or 143 ended by SIGINT or SIGTERM before the model was loaded.
    """
    from backfill.api.config import ServerConfig

    started_at_s = time.monotonic()
    try:
        engine.configure_logging(log_level, "server")
        server_config = ServerConfig(
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            api_keys=tuple(api_key or ()),
            api_key_file=api_key_file,
            max_queued_requests=max_queued_requests,
            max_queued_offline_requests=max_queued_offline_requests,
            max_body_bytes=max_body_bytes,
            max_inflight_body_bytes=max_inflight_body_bytes,
            max_response_tokens=max_response_tokens,
            max_connections=max_connections,
            head_timeout_s=head_timeout,
            body_timeout_s=body_timeout,
            write_timeout_s=write_timeout,
            allowed_hosts=tuple(allowed_hosts or ()),
            allowed_origins=tuple(allowed_origins or ()),
            drain_timeout_s=shutdown_timeout,
            keep_alive_interval_s=sse_keep_alive_interval,
            vllm_metrics=vllm_metrics,
            is_strict=strict,
            sheds_hopeless=shed_hopeless,
            log_level=log_level.upper(),
        )
        server_config.validate()
        if shed_hopeless and policy != "slo":
            raise ConfigError(f"--shed-hopeless needs --policy slo, got --policy {policy}.")
        engine_config = EngineOptions(
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_prefill_chunk_tokens,
            block_size=block_size,
            kv_gib=kv_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            threads=threads,
            policy=policy,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            profile=profile,
            promote_before=promote_before,
            preemption=preemption,
            host_kv_gib=host_kv_gib,
            checkpointing=checkpointing,
            kv_restore=kv_restore,
            victims=victims,
            engine_hang_timeout=engine_hang_timeout,
        ).config()
        jobs_config = JobsConfig(
            data_dir=data_dir.expanduser(),
            database_url=batch_database_url,
            max_lines=batch_max_lines,
            max_batch_bytes=batch_max_bytes,
            max_line_bytes=max_body_bytes,
            # A batch's file may be as large as asked, so any file may.
            max_file_bytes=max(batch_max_bytes, _JOBS_DEFAULTS.max_file_bytes),
            max_stored_bytes=_finite_above_0("--batch-max-storage-gib", batch_max_storage_gib, GIB),
            max_owner_bytes=_finite_above_0("--batch-max-owner-gib", batch_max_owner_gib, GIB),
            min_free_bytes=_min_free_bytes(batch_min_free_gib),
            max_uploads=batch_max_uploads,
            max_open_batches=batch_max_open,
            max_queued_lines=batch_max_queued_lines,
            retention_s=_finite_above_0("--batch-retention-hours", batch_retention_hours, 3600) or 0,
        )
        jobs_config.validate()
        _run(
            model,
            revision,
            server_config,
            engine_config,
            jobs_config if batch_api else None,
            read_template(chat_template),
            uses_generation_config(generation_config),
            jobs_config.data_dir,
            started_at_s,
        )
    except BackfillError as error:
        typer.echo(f"backfill: {error}", err=True)
        raise typer.Exit(1) from None


def _run(
    model: str,
    revision: str | None,
    server_config: Any,
    engine_config: EngineConfig,
    jobs_config: JobsConfig | None,
    chat_template: str | None,
    uses_generation_config: bool,
    data_dir: Path,
    started_at_s: float,
) -> None:
    from backfill.api.keys import ApiKeys
    from backfill.api.listener import bind
    from backfill.engine.client import EngineClient

    keys = None
    if server_config.asks_for_keys:
        keys = ApiKeys(server_config.api_keys, server_config.api_key_file)
    listener = bind(server_config.host, server_config.port)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with interruptible(LOADING):
        folder = engine.find_folder(model, revision)
    engine_config = dataclasses.replace(engine_config, model_dir=str(folder))
    check_profile(engine_config)
    if jobs_config is not None:
        _check_data_folder(jobs_config.data_dir, url)
    client = EngineClient(engine_config, log_level=server_config.log_level)
    atexit.register(client.abandon)  # wherever this ends
    exit_after(client.abandon)
    client.launch()  # now: it loads while the server is imported, which takes a second
    from backfill.api.server import Server
    from backfill.engine.messages import Ready

    served = engine.served_model(model, folder, server_config.served_model_names)

    def on_started() -> None:
        _save_config(data_dir, server_config, engine_config, jobs_config, served)

    def on_ready(ready: Ready) -> None:
        took_s = time.monotonic() - started_at_s
        print(_banner(ready.info, served.names[0], url, took_s, asks_for_keys=keys is not None), flush=True)

    async def run() -> signal.Signals | None:
        server = Server(
            server_config,
            engine_config,
            served,
            client=client,
            url=url,
            api_keys=keys,
            jobs_config=jobs_config,
            chat_template=chat_template,
            uses_generation_config=uses_generation_config,
            on_started=on_started,
            on_ready=on_ready,
        )
        try:
            return await server.run(listener)
        finally:
            take_from_loop(asyncio.get_running_loop())

    stopped_by = engine.run_in_loop(run())
    if stopped_by is not None:
        typer.echo(f"backfill: {LOADING}", err=True)
        raise typer.Exit(128 + stopped_by)


def _banner(info: ExecutorInfo, name: str, url: str, took_s: float, *, asks_for_keys: bool) -> str:
    """What is served where, and a request that can be copied."""
    if info.max_model_len < _TINY_CONTEXT:  # a chat template alone may be longer
        path = "/v1/completions"
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": max(1, min(16, info.max_model_len // 2))}
    else:
        path = "/v1/chat/completions"
        messages = [{"role": "user", "content": "What is gravity?"}]
        body = {"messages": messages, "temperature": 0.2}
    # A key would be shown to whoever reads the log.
    key_header = ' -H "Authorization: Bearer $KEY"' if asks_for_keys else ""
    lines = [
        "",
        f"Backfill serves {name} on {url}  (ready in {took_s:.1f} s)",
        f"  {info.device}, {info.dtype}, context of {info.max_model_len} tokens, "
        f"KV pool of {info.num_blocks * info.block_size} tokens",
        "Try, with an API key in KEY:" if asks_for_keys else "Try:",
        f"curl {url}{path} -H 'Content-Type: application/json'{key_header} \\",
        f"  -d '{json.dumps(body)}'",
        "",
    ]
    return "\n".join(lines)


def _check_data_folder(folder: Path, url: str) -> None:
    """Refuse a folder that another server holds before an engine is launched; the server takes it later.

    Raises: ConfigError.
    """
    lock = DataFolderLock(folder, url)
    lock.acquire()
    lock.release()


def _finite_above_0(option: str, value: float | None, factor: int) -> int | None:
    """``value`` in the unit of ``factor``. Raises: ConfigError."""
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} must be above 0, got {value:g}.")
    return int(value * factor)


def _min_free_bytes(gib: float) -> int:
    if not (math.isfinite(gib) and gib >= 0):
        raise ConfigError(f"--batch-min-free-gib must be 0 or more, got {gib:g}.")
    return int(gib * GIB)


def _save_config(
    data_dir: Path,
    server_config: Any,
    engine_config: EngineConfig,
    jobs_config: JobsConfig | None,
    served: Any,
) -> None:
    """Leave the resolved configuration, without keys, where an operator can find it."""
    server = dataclasses.asdict(server_config)
    server["api_keys"] = ["***"] * len(server_config.api_keys)
    resolved: dict[str, Any] = {
        "pid": os.getpid(),
        "model_names": list(served.names),
        "server": server,
        "engine": dataclasses.asdict(engine_config),
        "batches": None if jobs_config is None else dataclasses.asdict(jobs_config),
    }
    if jobs_config is not None and jobs_config.database_url is not None:
        resolved["batches"]["database_url"] = "***"  # it may hold a password
    try:
        make_folder(data_dir)
        content = json.dumps(resolved, indent=2, default=str) + "\n"
        write_durably(data_dir / "config.json", content.encode())
    except OSError as error:
        raise ConfigError(f"--data-dir {data_dir} cannot be written: {error.strerror or error}.") from error
