"""Options that every command with a model of its own has, and what they resolve to."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import jinja2
import typer

from backfill.core.config import (
    GIB,
    CheckpointingName,
    EngineConfig,
    PolicyName,
    PreemptionMode,
    RestoreMode,
    SchedulerConfig,
    VictimOrder,
)
from backfill.core.errors import ConfigError

if TYPE_CHECKING:
    from backfill.protocol.preparer import ServedModel

Result = TypeVar("Result")

DEFAULT_MODEL = "smollm2-135m-instruct"
ENGINE_DEFAULTS = EngineConfig(model_dir="")
LIMITS = SchedulerConfig()

MODEL_HELP = "Known name, Hugging Face folder, GGUF file or hub id."

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
ServedModelName = Annotated[
    list[str] | None, typer.Option(help="Name clients use; repeatable, the first is echoed.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
LoadFormat = Annotated[
    str, typer.Option(help="auto, safetensors, or dummy: random weights of the model's shapes.")
]
MaxModelLen = Annotated[
    str | None, typer.Option(help="Tokens of prompt and output together, such as 4096 or 4k.")
]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests in one batch.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens computed in one step.")]
MaxPrefillChunkTokens = Annotated[int, typer.Option(help="Tokens of one prompt computed in one step.")]
BlockSize = Annotated[int, typer.Option(help="Tokens of a KV block.")]
KvGib = Annotated[
    float | None,
    typer.Option(
        help="Size of the KV pool in GiB. Default: 1 on CPU, what is free on CUDA.",
        envvar="BACKFILL_CPU_KVCACHE_SPACE",
    ),
]
HostKvGib = Annotated[
    float | None,
    typer.Option(
        help="Size in GiB of a second KV pool in host memory, where preempted requests' KV waits; 0: none. "
        "Default: as large as the KV pool, at most a quarter of the memory available."
    ),
]
Checkpointing = Annotated[
    str | None,
    typer.Option(
        help="When KV is copied to host memory: adaptive as the pool fills, eager as soon as a block is "
        "full, swap at a preemption, which waits for it, or none: what is preempted is computed again. "
        "Default: adaptive with --policy slo or --host-kv-gib, else none."
    ),
]
KvRestore = Annotated[
    str,
    typer.Option(
        help="How the KV of preempted requests comes back: background, while others run, or blocking."
    ),
]
Victims = Annotated[
    str,
    typer.Option(help="Offline request to preempt first with --policy slo: least-lost work, or the latest."),
]
GpuMemoryUtilization = Annotated[float, typer.Option(help="Share of the GPU's memory to use.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads of the CPU kernels. Default: the processors available.")
]
Policy = Annotated[
    str,
    typer.Option(
        help="Who is served when: slo keeps online requests' objectives and fills what they leave with "
        "offline work; online-only, fcfs, priority and round-robin are there to compare with."
    ),
]
TtftSlo = Annotated[
    float | None,
    typer.Option(
        help="Seconds to the first token for online requests that bring no objective of their own. "
        "Default: 1, or 4 times what one request alone needs if that is more."
    ),
]
TpotSlo = Annotated[
    float | None,
    typer.Option(help="Seconds that every gap between two tokens may take, likewise. Default: 0.15."),
]
Profile = Annotated[
    Path | None,
    typer.Option(help="Cost profile to predict steps with. Default: the one of this model and device."),
]
Preemption = Annotated[
    str,
    typer.Option(
        help="Offline work that an arrival stops inside a step: suspend it, or discard and redo it."
    ),
]
PromoteBefore = Annotated[
    float,
    typer.Option(
        help="Seconds before the end of its completion window at which offline work goes before other "
        "offline work; 0 never. Only with --policy slo."
    ),
]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="File with a Jinja chat template to use instead of the model's.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse requests with unknown fields, rather than warn of them."),
]
GenerationConfig = Annotated[str, typer.Option(help="auto: sampling defaults from the model; vllm: none.")]
EngineHangTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds without a word from the loaded engine after which it is killed and started again; 0: "
        "never. Default: 20 times the longest step there can be, at least 30; 300 without a cost profile."
    ),
]
LogLevel = Annotated[
    str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.", envvar="BACKFILL_LOGGING_LEVEL")
]


def build_engine_config(
    *,
    device: str,
    dtype: str,
    load_format: str,
    max_model_len: str | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_prefill_chunk_tokens: int,
    block_size: int,
    kv_gib: float | None,
    host_kv_gib: float | None = None,
    gpu_memory_utilization: float,
    threads: int | None,
    policy: str = LIMITS.policy,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    profile: Path | None = None,
    promote_before_s: float = LIMITS.promote_before_s,
    preemption: str = LIMITS.preemption,
    checkpointing: str | None = None,
    restore: str = LIMITS.restore,
    victims: str = LIMITS.victims,
    hang_timeout_s: float | None = None,
) -> EngineConfig:
    """The options as one valid configuration, but for the model's folder. Raises: ConfigError."""
    if host_kv_gib == 0:
        if checkpointing not in (None, "none"):
            raise ConfigError(f"--checkpointing {checkpointing} needs a pool, and --host-kv-gib is 0.")
        checkpointing = "none"
    elif checkpointing is None:
        checkpointing = "adaptive" if policy == "slo" or host_kv_gib else "none"
    elif checkpointing == "none" and host_kv_gib:
        raise ConfigError(f"--host-kv-gib {host_kv_gib:g} is of no use with --checkpointing none.")
    config = EngineConfig(
        model_dir="",  # known once the model is resolved
        device=one_of("--device", device, ("auto", "cpu", "cuda")),
        dtype=one_of("--dtype", dtype, ("auto", "bfloat16", "float16", "float32")),
        load_format=one_of("--load-format", load_format, ("auto", "safetensors", "dummy")),
        block_size=block_size,
        kv_bytes=_parse_gib("--kv-gib", kv_gib),
        host_kv_bytes=_parse_gib("--host-kv-gib", host_kv_gib, may_be_0=True),
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=_parse_tokens(max_model_len),
        num_threads=threads,
        hang_timeout_s=hang_timeout_s,
        profile_path=None if profile is None else str(profile.expanduser()),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_prefill_chunk_tokens,
            policy=one_of("--policy", policy, get_args(PolicyName)),
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            promote_before_s=promote_before_s,
            preemption=one_of("--preemption", preemption, get_args(PreemptionMode)),
            checkpointing=one_of("--checkpointing", checkpointing, get_args(CheckpointingName)),
            restore=one_of("--kv-restore", restore, get_args(RestoreMode)),
            victims=one_of("--victims", victims, get_args(VictimOrder)),
        ),
    )
    config.validate()
    return config


def find_model(model: str, revision: str | None, names: tuple[str, ...]) -> ServedModel:
    """Fetch and convert the model where needed. Raises: ModelError for one that cannot be served."""
    from backfill.models.config import ModelConfig
    from backfill.models.resolve import resolve_model
    from backfill.protocol.preparer import ServedModel

    folder = resolve_model(model, revision=revision)
    ModelConfig.from_folder(folder)  # refused before anything starts
    return ServedModel(
        names=names or (_default_name(model),),
        root=model if _is_hub_id(model) else str(folder),
        folder=folder,
        created=int(time.time()),
    )


def check_profile(config: EngineConfig) -> None:
    """Refuse a named cost profile before the model is loaded, as far as that can be known by then.

    Whether it is of another device or dtype the engine finds out. Raises: ConfigError.
    """
    from backfill.costs.profile import CostProfile
    from backfill.models.config import ModelConfig

    if config.profile_path is None:
        return
    profile = CostProfile.load(Path(config.profile_path))
    model = ModelConfig.from_folder(config.model_dir).shape_key
    profile.check_key(dataclasses.replace(profile.key, model=model), config.profile_path)


def configure_logging(level: str, program: str) -> None:
    """Log to standard error, each line naming ``program``. Raises: ConfigError."""
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {level!r}.")
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname)s {program}: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "huggingface_hub", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # warns of every malformed body


def run_in_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on uvloop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def uses_generation_config(value: str) -> bool:
    """Whether the model's own sampling defaults hold. Raises: ConfigError."""
    return bool(one_of("--generation-config", value, ("auto", "vllm")) == "auto")


def read_template(path: Path | None) -> str | None:
    """The text of a chat template that parses. Raises: ConfigError."""
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


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
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


def _parse_gib(option: str, gib: float | None, *, may_be_0: bool = False) -> int | None:
    if gib is None:
        return None
    if not math.isfinite(gib) or gib < 0 or (gib == 0 and not may_be_0):
        allowed = "of at least 0" if may_be_0 else "above 0"
        raise ConfigError(f"{option} must be a finite number {allowed}, got {gib:g}.")
    return int(gib * GIB)


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not Path(model).exists()


def _default_name(model: str) -> str:
    """What clients call the model: a known name or hub id as given, else the folder's or file's name."""
    path = Path(model)
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model
