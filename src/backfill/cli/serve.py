"""``backfill serve``: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from backfill.cli import engine_options as engine
from backfill.cli.engine_options import ENGINE_DEFAULTS, LIMITS
from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import BackfillError, ConfigError
from backfill.jobs.config import JobsConfig

_JOBS_DEFAULTS = JobsConfig(data_dir=Path())


def serve(
    model: Annotated[str, typer.Argument(help=engine.MODEL_HELP)] = engine.DEFAULT_MODEL,
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
    max_queued_requests: Annotated[
        int, typer.Option(help="Requests accepted beyond --max-num-seqs; more get HTTP 429.")
    ] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Larger request bodies get HTTP 413.")] = 32 << 20,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key clients must send; repeatable.", envvar="BACKFILL_API_KEY"),
    ] = None,
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
    batch_retention_hours: Annotated[
        float, typer.Option(help="Hours after which input and result files are deleted.")
    ] = _JOBS_DEFAULTS.retention_s / 3600,
    log_level: engine.LogLevel = "INFO",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API. Fetches and converts the model first, where needed."""
    from backfill.api.config import ServerConfig

    started_at_s = time.monotonic()
    try:
        engine.configure_logging(log_level, "server")
        server_config = ServerConfig(
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            api_keys=_non_empty_keys(api_key or []),
            max_queued_requests=max_queued_requests,
            max_body_bytes=max_body_bytes,
            drain_timeout_s=shutdown_timeout,
            keep_alive_interval_s=sse_keep_alive_interval,
            vllm_metrics=vllm_metrics,
            log_level=log_level.upper(),
        )
        server_config.validate()
        engine_config = engine.build_engine_config(
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
            ttft_slo_s=ttft_slo,
            tpot_slo_s=tpot_slo,
            profile=profile,
            promote_before_s=promote_before,
            preemption=preemption,
            host_kv_gib=host_kv_gib,
            checkpointing=checkpointing,
            restore=kv_restore,
            victims=victims,
        )
        jobs_config = JobsConfig(
            data_dir=data_dir.expanduser(),
            database_url=batch_database_url,
            max_lines=batch_max_lines,
            max_batch_bytes=batch_max_bytes,
            # A batch's file may be as large as asked, so any file may.
            max_file_bytes=max(batch_max_bytes, _JOBS_DEFAULTS.max_file_bytes),
            max_stored_bytes=_finite_above_0("--batch-max-storage-gib", batch_max_storage_gib, GIB),
            retention_s=_finite_above_0("--batch-retention-hours", batch_retention_hours, 3600) or 0,
        )
        jobs_config.validate()
        _run(
            model,
            revision,
            server_config,
            engine_config,
            jobs_config if batch_api else None,
            engine.read_template(chat_template),
            engine.uses_generation_config(generation_config),
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
    from backfill.api.server import Server, bind
    from backfill.engine.messages import Ready

    listener = bind(server_config.host, server_config.port)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    served = engine.find_model(model, revision, server_config.served_model_names)
    engine_config = dataclasses.replace(engine_config, model_dir=str(served.folder))

    def on_started() -> None:
        _save_config(data_dir, server_config, engine_config, jobs_config, served)

    def on_ready(ready: Ready) -> None:
        _print_banner(ready, served.names[0], url, time.monotonic() - started_at_s)

    async def run() -> None:
        server = Server(
            server_config,
            engine_config,
            served,
            url=url,
            jobs_config=jobs_config,
            chat_template=chat_template,
            uses_generation_config=uses_generation_config,
            on_started=on_started,
            on_ready=on_ready,
        )
        await server.run(listener)

    engine.run_in_loop(run())


def _print_banner(ready: Any, name: str, url: str, took_s: float) -> None:
    info = ready.info
    messages = [{"role": "user", "content": "What is gravity?"}]
    body = json.dumps({"messages": messages, "temperature": 0.2})
    lines = [
        "",
        f"Backfill serves {name} on {url}  (ready in {took_s:.1f} s)",
        f"  {info.device}, {info.dtype}, context of {info.max_model_len} tokens, "
        f"KV pool of {info.num_blocks * info.block_size} tokens",
        "Try:",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"  -d '{body}'",
        "",
    ]
    print("\n".join(lines), flush=True)


def _non_empty_keys(keys: list[str]) -> tuple[str, ...]:
    if any(not key.strip() for key in keys):
        raise ConfigError("--api-key must not be empty.")
    return tuple(key.strip() for key in keys)


def _finite_above_0(option: str, value: float | None, factor: int) -> int | None:
    """``value`` in the unit of ``factor``. Raises: ConfigError."""
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} must be above 0, got {value:g}.")
    return int(value * factor)


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
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / "config.json").write_text(json.dumps(resolved, indent=2, default=str) + "\n")
    except OSError as error:
        raise ConfigError(f"--data-dir {data_dir} cannot be written: {error.strerror or error}.") from error
