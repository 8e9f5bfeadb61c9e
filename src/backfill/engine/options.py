"""Which model an engine runs, and what can be checked of it before it is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from backfill.core.config import EngineConfig
from backfill.costs.profile import CostProfile
from backfill.models.config import ModelConfig
from backfill.models.resolve import DEFAULT_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A model, by the name that ``models.resolve_model`` takes.

    Attributes:
        model: known name, Hugging Face folder, GGUF file or hub id.
        revision: branch, tag or commit of a hub model.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None


def check_profile(config: EngineConfig) -> None:
    """Refuse a named cost profile before the model is loaded, as far as it can be known by then.

    The engine finds out whether it is of another device or dtype. Raises: ConfigError.
    """
    if config.profile_path is None:
        return
    profile = CostProfile.load(Path(config.profile_path))
    model = ModelConfig.from_folder(config.model_dir).shape_key
    profile.check_key(dataclasses.replace(profile.key, model=model), config.profile_path)
