"""Profiles of devices and models to simulate, part of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec

from backfill.core.errors import ConfigError
from backfill.costs.profile import CostProfile

_Positive = Annotated[int, msgspec.Meta(ge=1)]  # checked where a file is read


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A model on a device, for simulation.

    Attributes:
        costs: fitted to measured operator times; ``costs.provenance`` says which times were modelled.
        kv_tokens: tokens of KV that fit beside the weights.
        kv_bytes_per_token: all layers, all devices together.
        max_model_len: the model's context, in tokens.
        stage_layers: layers of each stage of a pipeline; empty for one stage.
    """

    name: str
    costs: CostProfile
    kv_tokens: _Positive
    kv_bytes_per_token: _Positive
    max_model_len: _Positive
    stage_layers: tuple[int, ...] = ()

    def resized(
        self, kv_tokens: int | None, kv_bytes_per_token: int | None = None, max_model_len: int | None = None
    ) -> HardwareProfile:
        """With other sizes, where they are given."""
        return replace(
            self,
            kv_tokens=kv_tokens or self.kv_tokens,
            kv_bytes_per_token=kv_bytes_per_token or self.kv_bytes_per_token,
            max_model_len=max_model_len or self.max_model_len,
        )

    def slowed(self, factor: float) -> HardwareProfile:
        """The same device and model, so many times as slow."""
        costs, copies = self.costs, self.costs.copies
        if copies is not None:
            copies = replace(
                copies,
                to_host_bytes_per_s=copies.to_host_bytes_per_s / factor,
                to_device_bytes_per_s=copies.to_device_bytes_per_s / factor,
            )
        return replace(self, costs=replace(costs, cost=costs.cost.slowed(factor), copies=copies))


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
    return parse_hardware_profile(name, json.loads(path.read_text(encoding="utf-8")), name)


def parse_hardware_profile(name: str, content: dict[str, Any], file: str) -> HardwareProfile:
    """``content`` as JSON has it. Raises: ConfigError that names the file if a value is wrong or missing."""
    costs = CostProfile.parse(content["costs"], file)
    try:
        return replace(msgspec.convert({**content, "name": name}, HardwareProfile), costs=costs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The hardware profile {file} is damaged ({error}).") from error


def load_device(
    name_or_path: str, kv_tokens: int | None, kv_bytes_per_token: int | None, max_model_len: int | None
) -> tuple[HardwareProfile, CostProfile | None]:
    """A device to simulate: a hardware profile, by name or in a JSON file, or a measured cost profile.

    A cost profile does not say how much KV fits. Without ``kv_bytes_per_token`` the device has no KV pool in
    host memory, and its context is the farthest position that the profile knows.

    Args:
        kv_tokens, kv_bytes_per_token, max_model_len: instead of the hardware profile's, if given.

    Returns: the device, and the cost profile that its user has measured, if that is what the file holds.
    Raises: ConfigError.
    """
    path = Path(name_or_path)
    if name_or_path not in hardware_profile_names() and path.is_file():
        content = _read_json(path)
        if not isinstance(content, dict) or "costs" not in content:
            measured = CostProfile.parse(content, str(path))
            return _measured_device(path, measured, kv_tokens, kv_bytes_per_token, max_model_len)
        hardware = parse_hardware_profile(path.stem, content, str(path))
    elif name_or_path in hardware_profile_names():
        hardware = load_hardware_profile(name_or_path)
    else:
        raise ConfigError(
            f"{name_or_path!r} is no file and no hardware profile; there are "
            f"{', '.join(hardware_profile_names())}.",
            field="hardware",
        )
    return hardware.resized(kv_tokens, kv_bytes_per_token, max_model_len), None


def _measured_device(
    path: Path,
    measured: CostProfile,
    kv_tokens: int | None,
    kv_bytes_per_token: int | None,
    max_model_len: int | None,
) -> tuple[HardwareProfile, CostProfile]:
    if kv_tokens is None:
        raise ConfigError(
            f"is needed with the cost profile {path}, which does not say it.", field="kv_tokens"
        )
    if kv_bytes_per_token is None:
        measured = replace(measured, copies=None)
    context = max_model_len or max(measured.known_tokens, 1)
    return HardwareProfile(path.stem, measured, kv_tokens, kv_bytes_per_token or 0, context), measured


def _read_json(path: Path) -> object:
    """Raises: ConfigError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.", field="hardware") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON.", field="hardware") from error
