"""Policies that scenarios compare, some with parts switched off."""

from __future__ import annotations

from dataclasses import dataclass

from backfill.core.config import CheckpointingName, PolicyName, RestoreMode, VictimOrder
from backfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variant:
    """Named settings of the scheduler."""

    name: str
    policy: PolicyName
    checkpointing: CheckpointingName = "none"
    restore: RestoreMode = "background"
    victims: VictimOrder = "least-lost"


_VARIANTS = (
    Variant("online-only", "online-only"),
    Variant("fcfs", "fcfs"),
    Variant("round-robin", "round-robin"),
    Variant("priority", "priority", "swap", "blocking"),  # the paper's vLLM++
    Variant("priority-recompute", "priority"),  # as vLLM does today
    Variant("slo-recompute-latest", "slo", victims="latest"),
    Variant("slo-recompute", "slo"),
    Variant("slo-swap", "slo", "swap", "blocking"),
    Variant("slo-checkpoint", "slo", "adaptive", "blocking"),
    Variant("slo", "slo", "adaptive"),
    Variant("slo-eager", "slo", "eager"),
)


def variant_names() -> list[str]:
    return [variant.name for variant in _VARIANTS]


def variant(name: str) -> Variant:
    """The variant of a name. Raises: ConfigError that names the known ones."""
    for each in _VARIANTS:
        if each.name == name:
            return each
    raise ConfigError(f"There is no policy {name!r}; there are {', '.join(variant_names())}.")
