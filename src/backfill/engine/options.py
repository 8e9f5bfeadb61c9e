"""What a user may ask of an engine: options of the commands, keywords of ``LLM``.

Their rules are written here alone. The commands' signatures repeat names and defaults; a test compares them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from backfill.core.config import (
    GIB,
    CheckpointingName,
    DeviceKind,
    DType,
    EngineConfig,
    LoadFormat,
    PolicyName,
    PreemptionMode,
    RestoreMode,
    SchedulerConfig,
    VictimOrder,
)
from backfill.core.errors import ConfigError
from backfill.costs.profile import CostProfile
from backfill.models.config import ModelConfig

_LIMITS = SchedulerConfig()
_ENGINE = EngineConfig(model_dir="")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options as users write them. Field ``max_num_seqs`` is ``--max-num-seqs`` of a command, and so on.

    The commands' ``--help`` says what each means; times are in seconds, sizes in GiB. None takes a default.
    """

    device: str = _ENGINE.device
    dtype: str = _ENGINE.dtype
    load_format: str = _ENGINE.load_format
    max_model_len: int | str | None = None
    max_num_seqs: int = _LIMITS.max_num_seqs
    max_num_batched_tokens: int = _LIMITS.max_num_batched_tokens
    max_prefill_chunk_tokens: int = _LIMITS.max_prefill_chunk_tokens
    block_size: int = _ENGINE.block_size
    kv_gib: float | None = None
    host_kv_gib: float | None = None
    gpu_memory_utilization: float = _ENGINE.gpu_memory_utilization
    threads: int | None = None
    policy: str = _LIMITS.policy
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    profile: str | Path | None = None
    promote_before: float = _LIMITS.promote_before_s
    preemption: str = _LIMITS.preemption
    checkpointing: str | None = None
    kv_restore: str = _LIMITS.restore
    victims: str = _LIMITS.victims
    engine_hang_timeout: float | None = None

    def config(self) -> EngineConfig:
        """The options as one valid configuration, but for the model's folder. Raises: ConfigError."""
        config = EngineConfig(
            model_dir="",  # known once the model is resolved
            device=one_of("--device", self.device, get_args(DeviceKind)),
            dtype=one_of("--dtype", self.dtype, get_args(DType)),
            load_format=one_of("--load-format", self.load_format, get_args(LoadFormat)),
            block_size=self.block_size,
            kv_bytes=_gib_to_bytes("--kv-gib", self.kv_gib),
            host_kv_bytes=_gib_to_bytes("--host-kv-gib", self.host_kv_gib, may_be_0=True),
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=_parse_tokens(self.max_model_len),
            num_threads=self.threads,
            hang_timeout_s=self.engine_hang_timeout,
            profile_path=None if self.profile is None else str(Path(self.profile).expanduser()),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_prefill_chunk_tokens=self.max_prefill_chunk_tokens,
                policy=one_of("--policy", self.policy, get_args(PolicyName)),
                ttft_slo_s=self.ttft_slo,
                tpot_slo_s=self.tpot_slo,
                promote_before_s=self.promote_before,
                preemption=one_of("--preemption", self.preemption, get_args(PreemptionMode)),
                checkpointing=self._checkpointing(),
                restore=one_of("--kv-restore", self.kv_restore, get_args(RestoreMode)),
                victims=one_of("--victims", self.victims, get_args(VictimOrder)),
            ),
        )
        config.validate()
        return config

    def for_offline_work(self) -> EngineOptions:
        """The same for an engine that has no online requests.

        Without them there is nothing for ``slo`` to keep, and it would need a cost profile. What is preempted
        is kept in host memory.
        """
        checkpointing = self.checkpointing
        if checkpointing is None and self.host_kv_gib != 0:
            checkpointing = "adaptive"
        return dataclasses.replace(self, policy="priority", checkpointing=checkpointing)

    def _checkpointing(self) -> CheckpointingName:
        """As asked, else what suits the policy and the pool in host memory. Raises: ConfigError."""
        asked = self.checkpointing
        if self.host_kv_gib == 0:
            if asked not in (None, "none"):
                raise ConfigError(f"--checkpointing {asked} needs a pool, and --host-kv-gib is 0.")
            return "none"
        if asked is None:
            return "adaptive" if self.policy == "slo" or self.host_kv_gib else "none"
        if asked == "none" and self.host_kv_gib:
            raise ConfigError(f"--host-kv-gib {self.host_kv_gib:g} is of no use with --checkpointing none.")
        name: CheckpointingName = one_of("--checkpointing", asked, get_args(CheckpointingName))
        return name


def check_profile(config: EngineConfig) -> None:
    """Refuse a named cost profile before the model is loaded, as far as that can be known by then.

    Whether it is of another device or dtype the engine finds out. Raises: ConfigError.
    """
    if config.profile_path is None:
        return
    profile = CostProfile.load(Path(config.profile_path))
    model = ModelConfig.from_folder(config.model_dir).shape_key
    profile.check_key(dataclasses.replace(profile.key, model=model), config.profile_path)


def uses_generation_config(value: str) -> bool:
    """Whether the model's own sampling defaults hold. Raises: ConfigError."""
    return bool(one_of("--generation-config", value, ("auto", "vllm")) == "auto")


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{option} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}.")
    return value


def _parse_tokens(given: int | str | None) -> int | None:
    """A number, ``4096``, ``4k`` (4000), ``4K`` (4096) or ``auto``, as vLLM reads them."""
    if given is None or given == "auto":
        return None
    if isinstance(given, int):
        return given
    factors: dict[str, int] = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    factor = factors.get(given[-1:], 1)
    digits = given[:-1] if given[-1:] in factors else given
    if not digits.isdigit():
        raise ConfigError(f"--max-model-len must be a number such as 4096 or 4k, or auto, got {given!r}.")
    return int(digits) * factor


def _gib_to_bytes(option: str, gib: float | None, *, may_be_0: bool = False) -> int | None:
    if gib is None:
        return None
    if not math.isfinite(gib) or gib < 0 or (gib == 0 and not may_be_0):
        allowed = "of at least 0" if may_be_0 else "above 0"
        raise ConfigError(f"{option} must be a finite number {allowed}, got {gib:g}.")
    return int(gib * GIB)
