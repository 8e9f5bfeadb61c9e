"""Options that every command with a model of its own has. What they mean is in ``engine/options.py``."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError

if TYPE_CHECKING:
    from backfill.protocol.preparer import ServedModel

Result = TypeVar("Result")

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
    typer.Option(
        "--strict",
        help="Refuse requests with unknown fields or an empty slo, rather than warn of them. Known fields "
        "that are ignored, such as metadata, and keys inside messages are accepted.",
    ),
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


def find_model(model: str, revision: str | None, names: tuple[str, ...]) -> ServedModel:
    """Fetch and convert the model where needed. Raises: ModelError for one that cannot be served."""
    return served_model(model, find_folder(model, revision), names)


def find_folder(model: str, revision: str | None) -> Path:
    """The model's folder, likewise. Light to import, so that an engine can begin at once."""
    from backfill.models.config import ModelConfig
    from backfill.models.resolve import resolve_model

    folder = resolve_model(model, revision=revision)
    ModelConfig.from_folder(folder)  # refused before anything starts
    return folder


def served_model(model: str, folder: Path, names: tuple[str, ...]) -> ServedModel:
    """What a service answers for: by the names given, else by what the model is called."""
    from backfill.protocol.preparer import ServedModel

    return ServedModel(
        names=names or (_default_name(model),),
        root=model if _is_hub_id(model) else str(folder),
        folder=folder,
        created=int(time.time()),
    )


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


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not Path(model).exists()


def _default_name(model: str) -> str:
    """What clients call the model: a known name or hub id as given, else the folder's or file's name."""
    path = Path(model)
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model
