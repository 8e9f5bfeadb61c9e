"""``backfill serve``: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from backfill.cli.command import (
    ADDRESS_SECTION,
    BATCHES_SECTION,
    LIMITS_SECTION,
    MODEL_SECTION,
    VARIABLES,
    command,
)
from backfill.cli.interrupts import LOADING, exit_after, exit_at_once, interruptible
from backfill.cli.startup import (
    announce,
    check_data_dir,
    configure_logging,
    counted,
    find_folder,
    jobs_of,
    listen,
    process_age_s,
    run_server,
    served_model,
)
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.durable_files import write_durably
from backfill.core.errors import BackfillError, ConfigError
from backfill.core.heap import freeze_imports, pause_collection
from backfill.core.options import without_secrets
from backfill.engine.interpreter import end_interpreter
from backfill.engine.options import ModelOptions, check_engine, check_machine
from backfill.execution.machine import threads_of_rank
from backfill.http.config import ServerConfig
from backfill.ipc.log_lines import name_replica
from backfill.ipc.python_process import say_last_words
from backfill.jobs.config import JobsConfig
from backfill.jobs.private_files import make_folder, unusable
from backfill.protocol.options import read_template
from backfill.router.config import ReplicaOptions

if TYPE_CHECKING:
    from backfill.engine.client import EngineClient
    from backfill.engine.messages import Ready
    from backfill.execution.executor import ExecutorInfo
    from backfill.protocol.preparer import ServedModel
    from backfill.router.replicas import ReplicaPlace


logger = logging.getLogger(__name__)


def serve(
    model: ModelOptions,
    server: ServerConfig,
    jobs: JobsConfig,
    replicas: ReplicaOptions,
    engine: EngineConfig = EngineConfig(scheduler=SchedulerConfig(policy="slo")),  # noqa: B008  # frozen
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API. Fetches and converts the model first, where needed.

    Exit status: 0 ended by a signal; 1 it cannot serve, or not any more, or a second signal ended it at
    once; 130 or 143 ended by SIGINT or SIGTERM before the model was loaded.
    """
    configure_logging(server.log_level, "server")
    if server.shed_hopeless and not engine.scheduler.relegates:
        raise ConfigError(f"`shed_hopeless` needs `policy` slo, got `policy` {engine.scheduler.policy}.")
    check_machine(engine)
    jobs = jobs_of(server, jobs)
    if replicas.data_parallel_size > 1 or (engine.executor == "ray" and not replicas.is_replica):
        from backfill.cli.serve_replicas import serve_replicas

        end_interpreter()  # replicas start theirs
        serve_replicas(model, server, jobs, engine, replicas.data_parallel_size, _run_replica)
        return
    _run(model, server, engine.with_checkpointing(), jobs, read_template(server.chat_template))


app = command(
    serve,
    {
        "Model": MODEL_SECTION,
        "Parallelism": "tensor_parallel_size pipeline_parallel_size data_parallel_size executor threads",
        "Engine": "device num_micro_batches gpu_memory_utilization device_memory offload_interval "
        "min_offload_interval offload_bus offload_bus_gib_per_s profile engine_hang_timeout",
        "Scheduling": f"{LIMITS_SECTION} policy ttft_slo tpot_slo min_ttft_slo min_tpot_slo "
        "promote_before safepoints preemption max_stop_s",
        "KV memory": "kv_gib kv_dtype block_size host_kv_gib checkpointing checkpoint_from "
        "checkpoint_all_from kv_restore victims prefix_caching prefix_cache_scope kv_layout",
        "Address": ADDRESS_SECTION,
        "Server": "data_dir api_key api_key_file offline_header strict shed_hopeless shutdown_timeout "
        "sse_keep_alive_interval vllm_metrics otlp_traces_endpoint log_level",
        "Limits": "max_queued_requests max_queued_offline_requests max_body_bytes max_inflight_body_bytes "
        "max_response_tokens max_connections head_timeout body_timeout write_timeout",
        "Batches": BATCHES_SECTION,
    },
    positional="model",
    first="model quantization max_model_len tensor_parallel_size threads device max_num_seqs policy ttft_slo "
    "tpot_slo kv_gib host port data_dir api_key",
    spellings={"prefix_caching": "--enable-prefix-caching"},  # vLLM's
    variables=VARIABLES,
)


def _run_replica(
    model: ModelOptions, server: ServerConfig, jobs: JobsConfig, engine: EngineConfig, place: ReplicaPlace
) -> None:
    """Entry point of a replica's process, which ends with the one that has started it."""
    os.setsid()  # Ctrl-C is for the router, which ends its replicas itself
    signal.signal(signal.SIGTERM, exit_at_once)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the router says what is served where
    name_replica(place.number)
    server = dataclasses.replace(server, host=place.host, port=place.port, shares_port=True)
    jobs = dataclasses.replace(jobs, data_dir=jobs.data_dir / str(place.number))
    try:
        serve(model, server, jobs, ReplicaOptions(is_replica=True), engine)
    except BackfillError as error:
        say_last_words(str(error))
        raise SystemExit(1) from None


def _run(
    model: ModelOptions,
    server_config: ServerConfig,
    engine_config: EngineConfig,
    jobs_config: JobsConfig,
    chat_template: str | None,
) -> None:
    pause_collection()
    address = listen(server_config)
    with interruptible(LOADING):
        check_data_dir(jobs_config, address.url)
        folder = find_folder(model)
    engine_config = dataclasses.replace(engine_config, model_dir=str(folder))
    check_engine(engine_config)
    # Not earlier: who connects before this line waits, during a download for long.
    logger.info("starting on %s; /health answers 503 until %s is loaded", address.url, model.model)
    client = _launch(engine_config, server_config.log_level.upper())
    from backfill.api.server import Server  # takes a second, in which the engine loads

    freeze_imports()
    gc.enable()  # from here on requests are answered, if only that the engine loads
    served = served_model(model.model, folder, server_config.served_model_name)

    def on_started() -> None:
        _save_config(server_config, engine_config, jobs_config, served)

    def on_ready(ready: Ready) -> None:
        place = f"{address.place}  (ready in {process_age_s():.1f} s)"
        what = f"Backfill serves {served.names[0]} on {place}"
        page = (
            "" if server_config.uds else f"\n  a chat, the live view and batches in a browser: {address.url}/"
        )
        announce(f"{what}\n{_sizes(ready.info, engine_config)}{page}", address, ready.info.max_model_len)

    async def run() -> signal.Signals | None:
        server = Server(
            server_config,
            engine_config,
            served,
            client=client,
            url=address.url,
            api_keys=address.keys,
            jobs_config=jobs_config if jobs_config.batch_api else None,
            chat_template=chat_template,
            on_started=on_started,
            on_ready=on_ready,
        )
        return await server.run(address.listener)

    run_server(run())


def _launch(config: EngineConfig, log_level: str) -> EngineClient:
    """An engine that loads. It ends with this process, wherever that ends."""
    from backfill.engine.client import EngineClient

    client = EngineClient(config, log_level=log_level)
    atexit.register(client.abandon)
    exit_after(client.abandon)
    client.launch()
    return client


def _sizes(info: ExecutorInfo, config: EngineConfig) -> str:
    ranks = ""
    in_codes = f" in {info.kv_dtype}" if info.kv_dtype else ""
    types = f"weights in {info.stored_in}, computed in {info.dtype}" if info.stored_in else info.dtype
    if config.num_ranks > 1 and info.device == "cpu":
        threads = counted(threads_of_rank(config), "thread")
        ranks = f"\n  {config.num_ranks} ranks divide the threads: {threads} each"
    return (
        f"  {info.device}, {types}, context of {info.max_model_len} tokens, "
        f"KV pool of {info.num_blocks * info.block_size} tokens{in_codes}{ranks}"
    )


def _save_config(
    server_config: ServerConfig, engine_config: EngineConfig, jobs_config: JobsConfig, served: ServedModel
) -> None:
    """Leave the resolved configuration, without secrets, where an operator can find it."""
    resolved = {
        "pid": os.getpid(),
        "model_names": list(served.names),
        "server": without_secrets(server_config),
        "engine": without_secrets(engine_config),
        "batches": without_secrets(jobs_config) if jobs_config.batch_api else None,
    }
    try:
        make_folder(jobs_config.data_dir)
        content = json.dumps(resolved, indent=2, default=str) + "\n"
        write_durably(jobs_config.data_dir / "config.json", content.encode())
    except OSError as error:
        raise unusable(jobs_config.data_dir, error) from error
