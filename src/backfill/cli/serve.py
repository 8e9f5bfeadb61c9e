"""``backfill serve``: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer

from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.errors import BackfillError, ConfigError

_EngineDefaults = EngineConfig(model_dir="")
_Limits = SchedulerConfig()


def serve(
    model: Annotated[
        str, typer.Argument(help="Known name, Hugging Face folder, GGUF file or hub id.")
    ] = "smollm2-135m-instruct",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name clients use; repeatable, the first is echoed.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Folder for what the server itself keeps.", envvar="BACKFILL_DATA_DIR")
    ] = Path("~/.local/share/backfill"),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    load_format: Annotated[
        str, typer.Option(help="auto, safetensors, or dummy: random weights of the model's shapes.")
    ] = "auto",
    max_model_len: Annotated[
        str | None, typer.Option(help="Tokens of prompt and output together, such as 4096 or 4k.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests in one batch.")] = _Limits.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens computed in one step.")
    ] = _Limits.max_num_batched_tokens,
    max_prefill_chunk_tokens: Annotated[
        int, typer.Option(help="Tokens of one prompt computed in one step.")
    ] = _Limits.max_prefill_chunk_tokens,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = _EngineDefaults.block_size,
    kv_gib: Annotated[
        float | None,
        typer.Option(
            help="Size of the KV pool in GiB. Default: 1 on CPU, what is free on CUDA.",
            envvar="BACKFILL_CPU_KVCACHE_SPACE",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory to use.")
    ] = _EngineDefaults.gpu_memory_utilization,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU kernels. Default: the processors available.")
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Requests accepted beyond --max-num-seqs; more get HTTP 429.")
    ] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Larger request bodies get HTTP 413.")] = 32 << 20,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key clients must send; repeatable.", envvar="BACKFILL_API_KEY"),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template to use instead of the model's.")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto: sampling defaults from the model; vllm: none.")
    ] = "auto",
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to end after a signal.")
    ] = 30.0,
    sse_keep_alive_interval: Annotated[
        float, typer.Option(help="Seconds between comments on a silent stream; 0 sends none.")
    ] = 0.0,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Also expose the core metrics under vllm: names.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.", envvar="BACKFILL_LOGGING_LEVEL")
    ] = "INFO",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API. Fetches and converts the model first, where needed."""
    from backfill.api.config import ServerConfig

    started_at_s = time.monotonic()
    try:
        _configure_logging(log_level)
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
        engine_config = EngineConfig(
            model_dir="",  # known once the model is resolved
            device=_one_of("--device", device, ("auto", "cpu", "cuda")),
            dtype=_one_of("--dtype", dtype, ("auto", "bfloat16", "float16", "float32")),
            load_format=_one_of("--load-format", load_format, ("auto", "safetensors", "dummy")),
            block_size=block_size,
            kv_bytes=_parse_gib(kv_gib),
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=_parse_tokens(max_model_len),
            num_threads=threads,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_prefill_chunk_tokens=max_prefill_chunk_tokens,
            ),
        )
        uses_generation_config = _one_of("--generation-config", generation_config, ("auto", "vllm")) == "auto"
        _run(
            model,
            revision,
            server_config,
            engine_config,
            _read_template(chat_template),
            uses_generation_config,
            data_dir.expanduser(),
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
    chat_template: str | None,
    uses_generation_config: bool,
    data_dir: Path,
    started_at_s: float,
) -> None:
    from backfill.api.server import Server, bind
    from backfill.engine.messages import Ready
    from backfill.models.config import ModelConfig
    from backfill.models.resolve import resolve_model
    from backfill.protocol.service import ServedModel

    server_config.validate()
    engine_config.validate()
    listener = bind(server_config.host, server_config.port)
    host, port = listener.getsockname()[:2]
    folder = resolve_model(model, revision=revision)
    ModelConfig.from_folder(folder)  # a model that cannot be served is refused before anything starts
    served = ServedModel(
        names=server_config.served_model_names or (_default_name(model),),
        root=model if _is_hub_id(model) else str(folder),
        folder=folder,
        created=int(time.time()),
    )
    engine_config = dataclasses.replace(engine_config, model_dir=str(folder))
    _save_config(data_dir, server_config, engine_config, served)

    def on_ready(ready: Ready) -> None:
        _print_banner(ready, served.names[0], host, port, time.monotonic() - started_at_s)

    async def run() -> None:
        server = Server(
            server_config,
            engine_config,
            served,
            chat_template=chat_template,
            uses_generation_config=uses_generation_config,
            on_ready=on_ready,
        )
        await server.run(listener)

    try:
        import uvloop

        uvloop.run(run())
    except ImportError:
        asyncio.run(run())


def _print_banner(ready: Any, name: str, host: str, port: int, took_s: float) -> None:
    info = ready.info
    url_host = f"[{host}]" if ":" in host else host
    messages = [{"role": "user", "content": "What is gravity?"}]
    body = json.dumps({"model": name, "messages": messages, "temperature": 0.2})
    lines = [
        "",
        f"Backfill serves {name} on http://{url_host}:{port}  (ready in {took_s:.1f} s)",
        f"  {info.device}, {info.dtype}, context of {info.max_model_len} tokens, "
        f"KV pool of {info.num_blocks * info.block_size} tokens",
        "Try:",
        f"  curl http://{url_host}:{port}/v1/chat/completions \\",
        f"    -H 'Content-Type: application/json' -d '{body}'",
        "",
    ]
    print("\n".join(lines), flush=True)


def _configure_logging(level: str) -> None:
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {level!r}.")
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s server: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "huggingface_hub", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{option} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}.")
    return value


def _parse_tokens(text: str | None) -> int | None:
    """``4096``, ``4k`` (4000), ``4K`` (4096) or ``auto``, as vLLM reads them."""
    if text is None or text == "auto":
        return None
    factors: dict[str, int] = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    factor = factors.get(text[-1:], 1)
    digits = text[:-1] if text[-1:] in factors else text
    if not digits.isdigit():
        raise ConfigError(f"--max-model-len must be a number such as 4096 or 4k, or auto, got {text!r}.")
    return int(digits) * factor


def _parse_gib(gib: float | None) -> int | None:
    if gib is None:
        return None
    if not (math.isfinite(gib) and gib > 0):
        raise ConfigError(f"--kv-gib must be above 0, got {gib:g}.")
    return int(gib * GIB)


def _non_empty_keys(keys: list[str]) -> tuple[str, ...]:
    if any(not key.strip() for key in keys):
        raise ConfigError("--api-key must not be empty.")
    return tuple(key.strip() for key in keys)


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}.") from error
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        if "'generation'" not in str(error):  # a tag of transformers' own
            raise ConfigError(f"--chat-template {path}, line {error.lineno}: {error.message}") from error
    return template


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not Path(model).exists()


def _default_name(model: str) -> str:
    """What clients call the model: a known name or hub id as given, else the folder's or file's name."""
    path = Path(model)
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model


def _save_config(data_dir: Path, server_config: Any, engine_config: EngineConfig, served: Any) -> None:
    """Leave the resolved configuration, without keys, where an operator can find it."""
    server = dataclasses.asdict(server_config)
    server["api_keys"] = ["***"] * len(server_config.api_keys)
    resolved = {
        "pid": os.getpid(),
        "model_names": list(served.names),
        "server": server,
        "engine": dataclasses.asdict(engine_config),
    }
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--data-dir {data_dir} cannot be written: {error.strerror or error}.") from error
