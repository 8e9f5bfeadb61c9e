"""Configuration of one engine. Its fields are options of the commands and keywords of ``LLM``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from backfill.core.errors import ConfigError
from backfill.core.options import Bounds, bounded, check_types, internal, with_options
from backfill.core.slo import SLO

DType = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["auto", "none", "int8", "int4"]
DeviceKind = Literal["auto", "cpu", "cuda"]
PreemptionMode = Literal["suspend", "discard"]
CheckpointingName = Literal["adaptive", "eager", "swap", "lazy", "none"]
RestoreMode = Literal["background", "blocking"]
VictimOrder = Literal["least-lost", "latest"]
PrefixCacheScope = Literal["owner", "global"]
KVLayoutName = Literal["unidirectional", "bidirectional"]
PolicyName = Literal["slo", "conserve", "bros", "online-only", "fcfs", "priority", "round-robin"]

GIB = 1 << 30
MAX_RANKS = 64
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_CLASS_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_TOKEN_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold, and which requests it serves.

    Attributes:
        max_num_seqs: most requests in one step. A waiting request is scheduled only while fewer hold KV
            blocks, not counting those that it may preempt.
        max_num_batched_tokens: tokens computed in one step, prefill and decode together. With n pipeline
            stages a step has at most a 2n-th of them of prompts, though 256 if that is more.
        max_prefill_chunk_tokens: tokens of one prompt computed in one step. Bounds how long a long prompt
            delays the decodes it shares a step with.
        policy: which requests are served when. slo keeps online requests' objectives and serves offline
            requests in the slack; conserve and bros are these two papers' systems: they also set the defaults
            of ``preemption``, ``checkpointing`` and ``kv_layout`` to what the paper has. The three need a
            cost profile. The others are baselines.
        ttft_slo: seconds to the first token of online requests that bring no objective of their own. Default:
            1, 4 times what one request alone needs, or ``min_ttft_slo``, whichever is most.
        tpot_slo: seconds that each gap between two tokens may take for online requests that bring no
            objective of their own. Default: 0.15, 4 times what one decode alone takes, or ``min_tpot_slo``,
            whichever is most.
        min_ttft_slo: least TTFT objective in seconds that a request may bring. Default: any that is possible.
        min_tpot_slo: least TPOT objective in seconds that a request may bring. Default: any that is possible.
        promote_before: seconds before the end of its completion window at which an offline request goes
            before other offline requests; 0 is never. Only with ``policy`` slo.
        safepoints: an online request that arrives may stop the offline part of a running step, with
            ``policy`` conserve only of one without online requests. Only with ``policy`` slo or conserve.
        preemption: what becomes of offline work that an arrival stops inside a step. suspend: it resumes at
            its layer; discard: it is computed again. Only with ``safepoints``. Default: discard with
            ``policy`` conserve, else suspend.
        max_stop_s: seconds, as predicted, that a running step takes at most to its next safepoint; a layer
            that takes longer has one before it. Only with ``safepoints``.
        kept_slo: objectives of the engine before this one of the same server; None for the first one.
        checkpointing: when KV is copied to host memory. adaptive: as the KV pool fills; eager: as soon as a
            block is full; swap: at a preemption, which waits for it; lazy: when other KV takes its place,
            which waits for it; none: preempted requests are computed again; module:Class: a policy of your
            own. Default: lazy with ``policy`` bros, adaptive with slo or conserve or with ``host_kv_gib``,
            else none.
        checkpoint_from: share of the KV pool in use from which ``checkpointing`` adaptive copies blocks.
        checkpoint_all_from: share of the KV pool in use from which ``checkpointing`` adaptive copies every
            block.
        kv_restore: how the KV of preempted requests is restored. background: while other requests run;
            blocking: while all wait.
        victims: offline request to preempt first with ``policy`` slo: the one that loses the least work, or
            the latest.
        prefix_caching: KV of finished requests stays until its memory is needed, and requests whose tokens
            begin alike compute them once.
        prefix_cache_scope: who shares cached prefixes. owner: requests of one API key; global: all requests,
            which lets a client learn from its response time whether another one has sent the same text.
        kv_layout: how requests fill KV blocks. unidirectional: a block is filled by one request;
            bidirectional: an online request from its first slot and an offline one from its last, so that
            two share a block where memory is short. Default: bidirectional with ``policy`` slo or bros, else
            unidirectional.
    """

    max_num_seqs: int = bounded(256, least=1)
    max_num_batched_tokens: int = bounded(2048, least=1)
    max_prefill_chunk_tokens: int = bounded(2048, least=1)
    policy: PolicyName = "priority"
    ttft_slo: float | None = bounded(None, above=0)
    tpot_slo: float | None = bounded(None, above=0)
    min_ttft_slo: float | None = bounded(None, above=0)
    min_tpot_slo: float | None = bounded(None, above=0)
    kept_slo: SLO | None = internal(None)  # noqa: RUF009  # a field
    promote_before: float = bounded(3600.0, least=0)
    safepoints: bool = True
    preemption: PreemptionMode | None = None
    max_stop_s: float = bounded(0.005, above=0)
    checkpointing: CheckpointingName | str | None = None
    checkpoint_from: float = bounded(0.5, least=0, below=1)
    checkpoint_all_from: float = bounded(0.9, above=0, most=1)
    kv_restore: RestoreMode = "background"
    victims: VictimOrder = "least-lost"
    prefix_caching: bool = True
    prefix_cache_scope: PrefixCacheScope = "owner"
    kv_layout: KVLayoutName | None = None

    @property
    def shares_blocks(self) -> bool:
        """An online and an offline request may share a block."""
        if self.kv_layout is None:
            return self.policy in ("slo", "bros")
        return self.kv_layout == "bidirectional"

    @property
    def suspends(self) -> bool:
        """What an arrival stops resumes at its layer; else it is computed again."""
        if self.preemption is None:
            return self.policy != "conserve"
        return self.preemption == "suspend"

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of one prompt computed in one step, at most."""
        return min(self.max_num_batched_tokens, self.max_prefill_chunk_tokens)

    @property
    def relegates(self) -> bool:
        """The policy relegates online requests that cannot meet their TTFT objective any more."""
        return self.policy == "slo"

    @property
    def needs_cost_model(self) -> bool:
        """The policy predicts steps."""
        return self.policy in ("slo", "conserve", "bros")

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        for name in ("ttft_slo", "tpot_slo"):
            seconds, floor_s = getattr(self, name), getattr(self, f"min_{name}")
            if seconds is not None and floor_s is not None and seconds < floor_s:
                raise ConfigError(f"`{name}` {seconds:g} must be at least `min_{name}` {floor_s:g}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"`max_num_batched_tokens` ({self.max_num_batched_tokens}) must be at least `max_num_seqs` "
                f"({self.max_num_seqs}): each decoding request takes one token of a step."
            )
        asked, names = self.checkpointing, get_args(CheckpointingName)
        if asked is not None and asked not in names and not _CLASS_PATH.fullmatch(asked):
            raise ConfigError(
                f"must be {', '.join(names)} or module:Class, got {asked!r:.80}.", field="checkpointing"
            )
        first, all_from = self.checkpoint_from, self.checkpoint_all_from
        if first >= all_from:
            raise ConfigError(
                f"`checkpoint_from` ({first:g}) must be below `checkpoint_all_from` ({all_from:g})."
            )

    def ignored_options(self) -> dict[str, str]:
        """Options that are not at their defaults and have no effect, each with what makes it so."""
        found: dict[str, str] = {}
        if self.policy != "slo":
            found |= dict.fromkeys(("promote_before", "victims"), f"`policy` {self.policy}")
        if self.policy not in ("slo", "conserve"):
            found |= dict.fromkeys(("safepoints", "preemption", "max_stop_s"), f"`policy` {self.policy}")
        elif not self.safepoints:
            found |= dict.fromkeys(("preemption", "max_stop_s"), "`safepoints` off")
        if self.checkpointing in (None, "none"):
            found["kv_restore"] = "`checkpointing` none"
        if not self.prefix_caching:
            found["prefix_cache_scope"] = "`prefix_caching` off"
        return {
            name: reason
            for name, reason in found.items()
            if getattr(self, name) != getattr(_DEFAULT_SCHEDULER, name)
        }


_DEFAULT_SCHEDULER = SchedulerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to start.

    Attributes:
        model_dir: Hugging Face style folder, as ``backfill pull`` leaves it; empty until the model is found.
        seed: of the random weights of the load format dummy.
        device: where the model runs. auto: cuda where torch finds a device, else cpu.
        dtype: type of weights and KV. auto: as the model is stored, but on a CPU bfloat16 for float16.
        kv_dtype: type of KV. auto: ``dtype``; int8: 8 bits and a scale for each token and head, on CPU only.
        load_format: where weights come from. dummy: random weights of the model's shapes.
        quantization: how matrices are kept. auto: as the model's file has them, in 4 or 8 bits; none: in
            ``dtype``; int8 and int4: rounded when the model is loaded. On CUDA always in ``dtype``.
        max_model_len: tokens of prompt and output together, such as 4096 or 4K (4k is 4000). Default or auto:
            what the model and the KV pool allow.
        block_size: tokens of a KV block: 8, 16, 32 or 64.
        kv_gib: size of the KV pool in GiB. Default: 1 on CPU, what is free on CUDA.
        host_kv_gib: size in GiB of a second KV pool in host memory, which holds checkpointed blocks; 0 is
            none. Default: as large as the KV pool, at most a quarter of the memory available.
        gpu_memory_utilization: share of the GPU's memory to use.
        device_memory: most GiB for the weights on the device, a step's activations and the KV pool together.
            On CPU this is RAM, and libraries and the host's KV pool come on top. The KV pool is then what the
            others leave, unless ``kv_gib`` says otherwise. Default: what is free.
        offload_interval: the weights of one layer in so many are not kept on the device but transferred to it
            in each step: from a file in the cache folder on CPU, from host memory on CUDA. none keeps all.
            auto is the smallest with which offloading makes no recorded load miss its objectives; none where
            all fit and nothing would use the memory.
        min_offload_interval: smallest offloading interval that the engine may change to while serving. What
            the weights then need less of memory is used for KV. Needs a larger ``offload_interval`` or auto.
            Default: the interval does not change.
        offload_bus: name, or path of a file, that is the same for all engines whose transfers share a bus.
            They divide its bandwidth by what their objectives need. Default: the engine shares no bus.
        offload_bus_gib_per_s: bandwidth of ``offload_bus`` in GiB a second, the same for all. On CPU
            transfers are held to it.
        tensor_parallel_size: processes that share every layer: each has a part of its heads and columns. They
            are GPUs of one machine, or share its processors.
        pipeline_parallel_size: groups of processes that share the layers, each having some of them. As many
            steps are computed at a time.
        executor: what runs them. process: processes of this machine; ray: actors of Ray, on the cluster that
            the environment variable RAY_ADDRESS names, else one that is started on this machine. The
            ``tensor_parallel_size`` processes of a group are on one node.
        threads: threads of the CPU kernels, of all processes together. Default: the processors available;
            with ``executor`` ray as many as the cluster has for them.
        num_micro_batches: 1 or 2. With 2, the prefills and the decodes of a step are computed beside each
            other, on two CUDA streams. On CPU they take turns, which gains nothing.
        profile: cost profile that predicts step times. Default: the one saved for this model and device.
        engine_hang_timeout: seconds without a report after which a loaded engine is killed and started again;
            0 is never. Default: 20 times the longest step, at least 30; 300 without a cost profile.
    """

    model_dir: str = internal("")
    seed: int = internal(0)
    device: DeviceKind = "auto"
    dtype: DType = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    max_model_len: int | str | None = None
    block_size: int = 16
    kv_gib: float | None = bounded(None, above=0)
    host_kv_gib: float | None = bounded(None, least=0)
    gpu_memory_utilization: float = bounded(0.9, above=0, most=1)
    device_memory: float | None = bounded(None, above=0)
    offload_interval: int | str = "none"
    min_offload_interval: int | None = bounded(None, least=1)
    offload_bus: str | None = None
    offload_bus_gib_per_s: float | None = bounded(None, least=0.001)
    tensor_parallel_size: int = bounded(1, least=1)
    pipeline_parallel_size: int = bounded(1, least=1)
    executor: Literal["process", "ray"] = "process"
    threads: int | None = bounded(None, least=1)
    num_micro_batches: int = bounded(1, least=1, most=2)
    profile: str | Path | None = None
    engine_hang_timeout: float | None = bounded(None, least=0)
    scheduler: SchedulerConfig = _DEFAULT_SCHEDULER

    @property
    def max_model_tokens(self) -> int | None:
        """``max_model_len`` as a number; 4k is 4000 and 4K is 4096, as in vLLM. Raises: ConfigError."""
        given = self.max_model_len
        if given is None or given == "auto" or isinstance(given, int):
            return None if isinstance(given, str) else given
        unit = _TOKEN_UNITS.get(given[-1:])
        digits = given if unit is None else given[:-1]
        if not digits.isdigit():
            raise ConfigError(
                f"must be a number such as 4096 or 4k, or auto, got {given!r}.", field="max_model_len"
            )
        return int(digits) * (unit or 1)

    @property
    def kv_bytes(self) -> int | None:
        return None if self.kv_gib is None else max(1, int(self.kv_gib * GIB))

    @property
    def host_kv_bytes(self) -> int | None:
        return None if self.host_kv_gib is None else int(self.host_kv_gib * GIB)

    @property
    def device_memory_bytes(self) -> int | None:
        return None if self.device_memory is None else max(1, int(self.device_memory * GIB))

    @property
    def offload_every(self) -> int | None:
        """``offload_interval`` as a number; None for none, and for auto until the engine has chosen.

        Raises: ConfigError.
        """
        given = self.offload_interval
        if given in ("none", "auto"):
            return None
        if isinstance(given, str) and given.isdigit():
            given = int(given)
        if not isinstance(given, int) or given < 1:
            raise ConfigError(
                f"must be none, auto or a whole number of at least 1, got {given!r}.",
                field="offload_interval",
            )
        return given

    @property
    def num_ranks(self) -> int:
        """Processes that hold a part of the model each; with 1 the engine process holds all of it."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def offload_bus_bytes_per_s(self) -> float | None:
        return None if self.offload_bus_gib_per_s is None else self.offload_bus_gib_per_s * GIB

    @property
    def profile_path(self) -> str | None:
        return None if self.profile is None else str(Path(self.profile).expanduser())

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        if self.block_size not in (8, 16, 32, 64):
            raise ConfigError(f"must be 8, 16, 32 or 64, got {self.block_size}.", field="block_size")
        _ = self.offload_every
        self._validate_intervals()
        self._validate_bus()
        self._validate_ranks()
        if self.max_model_tokens is not None:
            Bounds(least=1).check("max_model_len", self.max_model_tokens)
        asked = self.scheduler.checkpointing
        if self.host_kv_gib == 0 and asked not in (None, "none"):
            raise ConfigError(f"`checkpointing` {asked} needs a pool, and `host_kv_gib` is 0.")
        if self.host_kv_gib and asked == "none":
            raise ConfigError(f"`host_kv_gib` {self.host_kv_gib:g} is of no use with `checkpointing` none.")
        self.scheduler.validate()
        used = self.with_checkpointing().scheduler.checkpointing
        for name in ("checkpoint_from", "checkpoint_all_from"):
            share = getattr(self.scheduler, name)
            if used != "adaptive" and share != getattr(_DEFAULT_SCHEDULER, name):
                raise ConfigError(f"`{name}` {share:g} is of no use with `checkpointing` {used}.")

    def _validate_intervals(self) -> None:
        least, largest = self.min_offload_interval, self.offload_every
        if least is None or self.offload_interval == "auto":
            return
        if largest is None or largest <= least:
            raise ConfigError(
                f"`min_offload_interval` {least} needs auto or a larger number as `offload_interval`, got "
                f"{self.offload_interval}."
            )

    def _validate_bus(self) -> None:
        name, gib_per_s = self.offload_bus, self.offload_bus_gib_per_s
        if (name is None) != (gib_per_s is None):
            raise ConfigError("`offload_bus` and `offload_bus_gib_per_s` need each other.")
        if name is None or gib_per_s is None:
            return
        if not name or "\0" in name or name in (".", ".."):
            raise ConfigError(f"must be a name or a path, got {name!r}.", field="offload_bus")
        if self.offload_interval == "none":
            raise ConfigError("`offload_bus` is of no use with `offload_interval` none.")
        if self.executor == "ray":
            raise ConfigError(
                "`offload_bus` is not supported with `executor` ray: a bus is of one machine, and the stages "
                "may be on several."
            )

    def _validate_ranks(self) -> None:
        sizes = {name: getattr(self, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        split = next((f"`{name}` {size}" for name, size in sizes.items() if size > 1), None)
        if split is None:
            return
        if self.threads is not None and self.threads < self.num_ranks:
            raise ConfigError(
                f"`threads` {self.threads} is less than the {self.num_ranks} processes of {split}, each "
                "of which needs one."
            )

    def with_checkpointing(self) -> EngineConfig:
        """With the checkpointing that suits the policy and the host pool, where none is named."""
        if self.scheduler.checkpointing is not None:
            return self
        has_pool = self.host_kv_gib != 0 and (self.scheduler.needs_cost_model or self.host_kv_gib is not None)
        suited = "lazy" if self.scheduler.policy == "bros" else "adaptive"
        return with_options(self, {"checkpointing": suited if has_pool else "none"})

    def for_offline_work(self) -> EngineConfig:
        """The same for an engine without online requests.

        It has no objectives to keep, and a policy that does would need a cost profile. It checkpoints what it
        preempts, unless it has no host pool.
        """
        asked = self.scheduler.checkpointing
        default = "none" if self.host_kv_gib == 0 else "adaptive"
        return with_options(self, {"policy": "priority", "checkpointing": asked or default})


def check_log_level(level: str) -> None:
    """Raises: ConfigError."""
    if level.upper() not in _LOG_LEVELS:
        raise ConfigError(f"must be DEBUG, INFO, WARNING or ERROR, got {level!r}.", field="log_level")
