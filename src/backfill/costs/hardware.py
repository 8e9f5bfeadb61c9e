"""Profiles of devices and models to simulate, part of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from backfill.core.errors import ConfigError
from backfill.costs.profile import CostProfile


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A model on a device, for simulation.

    Attributes:
        costs: fitted to measured operator times; ``costs.provenance`` says which times were modelled.
        kv_tokens: tokens of KV that fit beside the weights.
        kv_bytes_per_token: all layers, all devices together.
        max_model_len: the model's context, in tokens.
    """

    name: str
    costs: CostProfile
    kv_tokens: int
    kv_bytes_per_token: int
    max_model_len: int


def hardware_profile_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".json")
        for entry in resources.files(__package__).joinpath("hardware_profiles").iterdir()
        if entry.name.endswith(".json")
    )


def load_hardware_profile(name: str) -> HardwareProfile:
    """Raises: ConfigError for an unknown name, with the names that exist."""
    if name not in hardware_profile_names():
        raise ConfigError(
            f"There is no hardware profile {name!r}; there are {', '.join(hardware_profile_names())}."
        )
    path = resources.files(__package__).joinpath("hardware_profiles", f"{name}.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return HardwareProfile(name, CostProfile.parse(content.pop("costs"), name), **content)
