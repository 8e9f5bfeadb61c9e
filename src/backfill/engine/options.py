"""Which model an engine runs, and what can be checked of it before it is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from backfill.core.config import EngineConfig
from backfill.costs.profile import CostProfile
from backfill.models.config import ModelConfig
from backfill.models.generation_config import GenerationDefaults
from backfill.models.resolve import DEFAULT_MODEL, told_what_to_delete


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A model, by the name that ``models.resolve.resolve_model`` takes.

    Attributes:
        model: known name, Hugging Face folder, GGUF file or hub id.
        revision: branch, tag or commit of a hub model.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None


def check_machine(config: EngineConfig) -> None:
    """Refuse options that this machine cannot have, whatever the model. Raises: ConfigError."""
    from backfill.execution.machine import check_device, check_isa, check_threads

    check_device(config)
    check_isa(config)
    check_threads(config)


def check_engine(config: EngineConfig, *, needs_tokenizer: bool = True) -> None:
    """Refuse what can be known to be wrong of an engine's model and options before a process is started.

    Args:
        config: complete, with the model's folder.
        needs_tokenizer: its requests are text.
    Raises: ConfigError, ModelError, InsufficientMemory.
    """
    from backfill.execution.sizing import check_sizes
    from backfill.models.folder_check import check_complete, check_tokenizer, check_weights

    check_machine(config)
    folder = Path(config.model_dir)
    load_format = "dummy" if config.executor == "ray" else config.load_format  # whose nodes read the weights
    if needs_tokenizer:
        check_complete(folder, load_format)
    model = ModelConfig.from_folder(folder)
    check_sizes(config, model)
    check_profile(config)
    check_weights(folder, load_format, model)
    GenerationDefaults.from_folder(folder)
    if needs_tokenizer:
        with told_what_to_delete(folder):
            check_tokenizer(folder)


def check_profile(config: EngineConfig) -> None:
    """Refuse a named cost profile before the model is loaded, as far as it can be known by then.

    The engine finds out whether it is of another device or dtype. Raises: ConfigError.
    """
    if config.profile_path is None:
        return
    profile = CostProfile.load(Path(config.profile_path))
    model = ModelConfig.from_folder(config.model_dir).shape_key
    profile.check_key(dataclasses.replace(profile.key, model=model), config.profile_path)
