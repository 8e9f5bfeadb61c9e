"""Configuration of one engine, validated once at the edge and immutable afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from backfill.core.errors import ConfigError

DType = Literal["auto", "bfloat16", "float32", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
DeviceKind = Literal["auto", "cpu", "cuda"]
PreemptionMode = Literal["suspend", "discard"]
CheckpointingName = Literal["adaptive", "eager", "swap", "none"]
RestoreMode = Literal["background", "blocking"]
VictimOrder = Literal["least-lost", "latest"]
PolicyName = Literal["slo", "online-only", "fcfs", "priority", "round-robin"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: requests in one step, and requests that hold blocks where none may displace another.
        max_num_batched_tokens: tokens computed in one step, prefill and decode together.
        max_prefill_chunk_tokens: tokens of one prompt computed in one step; bounds how long a long
            prompt delays the decodes it shares a step with.
        policy: who is served when; ``slo`` is ConServe's and needs a cost profile, the others are baselines.
        ttft_slo_s, tpot_slo_s: objectives of online requests that bring none; None takes a default.
        preemption: what becomes of offline work that an arrival stops inside a step.
        max_stop_s: an arrival waits no longer for a running step to reach a safepoint, as predicted.
        promote_before_s: an offline request is served above its class when its completion window ends
            within this; 0 never promotes.
        checkpointing: when KV is copied to host memory: as memory fills (``adaptive``), as soon as a block is
            full (``eager``), only at a preemption, which waits for it (``swap``), or never, so that
            preempted requests are recomputed (``none``).
        restore: how a preempted request's KV comes back: while other requests run, or while all wait.
        victims: which offline request is preempted first: that which loses least work, or the latest.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_chunk_tokens: int = 2048
    policy: PolicyName = "priority"
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    promote_before_s: float = 3600.0
    preemption: PreemptionMode = "suspend"
    max_stop_s: float = 0.005
    checkpointing: CheckpointingName = "none"
    restore: RestoreMode = "background"
    victims: VictimOrder = "least-lost"

    def validate(self) -> None:
        if self.policy not in get_args(PolicyName):
            raise ConfigError(
                f"--policy must be one of {', '.join(get_args(PolicyName))}, got {self.policy!r}."
            )
        for option, value in (("--ttft-slo", self.ttft_slo_s), ("--tpot-slo", self.tpot_slo_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{option} must be a number of seconds above 0, got {value:g}.")
        for option, name, allowed in (
            ("--preemption", self.preemption, get_args(PreemptionMode)),
            ("--checkpointing", self.checkpointing, get_args(CheckpointingName)),
            ("--kv-restore", self.restore, get_args(RestoreMode)),
            ("--victims", self.victims, get_args(VictimOrder)),
        ):
            if name not in allowed:
                raise ConfigError(f"{option} must be one of {', '.join(allowed)}, got {name!r}.")
        if not (math.isfinite(self.promote_before_s) and self.promote_before_s >= 0):
            raise ConfigError(
                f"--promote-before must be a number of seconds of at least 0, got {self.promote_before_s:g}."
            )
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--max-prefill-chunk-tokens", self.max_prefill_chunk_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): each decoding request takes one token of a step."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to start.

    Attributes:
        model_dir: Hugging Face style folder, as ``backfill pull`` leaves it.
        max_model_len: tokens of prompt and output together; None takes what the model and the KV
            pool allow.
        kv_bytes: size of the KV pool; None takes the device's default.
        host_kv_bytes: size of the second KV pool, in host memory; None takes a default, 0 has none.
        profile_path: cost profile to use; None takes the one saved for this model and device.
        num_threads: threads of the CPU kernels; None takes the processors this process may use.
        hang_timeout_s: seconds without a report after which a loaded engine is taken to hang and killed; 0 is
            never, None a default (``engine/hang.py``).
    """

    model_dir: str
    device: DeviceKind = "auto"
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    block_size: int = 16
    kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    num_threads: int | None = None
    seed: int = 0
    profile_path: str | None = None
    hang_timeout_s: float | None = None
    scheduler: SchedulerConfig = SchedulerConfig()

    def validate(self) -> None:
        """Raise ConfigError naming the first option out of range and what it allows."""
        if self.block_size not in (8, 16, 32, 64):
            raise ConfigError(f"--block-size must be 8, 16, 32 or 64, got {self.block_size}.")
        if self.kv_bytes is not None:
            _at_least("--kv-gib", self.kv_bytes, 1)
        if self.host_kv_bytes is not None:
            _at_least("--host-kv-gib", self.host_kv_bytes, 0)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}."
            )
        if self.max_model_len is not None:
            _at_least("--max-model-len", self.max_model_len, 1)
        if self.num_threads is not None:
            _at_least("--threads", self.num_threads, 1)
        if self.hang_timeout_s is not None and not 0.0 <= self.hang_timeout_s < math.inf:
            raise ConfigError(
                f"--engine-hang-timeout must be a number of at least 0, got {self.hang_timeout_s:g}."
            )
        self.scheduler.validate()


def _at_least(option: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{option} must be at least {low}, got {value}.")
