"""Keywords of ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.engine.options import EngineOptions, uses_generation_config
from backfill.generation.chat_template import check_template, read_template

_TYPES = typing.get_type_hints(EngineOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """What an ``LLM`` is made from, checked as far as can be without the model.

    Attributes:
        engine_config: complete but for the model's folder.
        chat_template: Jinja source that replaces the model's own.
        seed: of the random weights of ``load_format="dummy"``, and of requests that bring none.
    """

    model: str
    revision: str | None
    engine_config: EngineConfig
    chat_template: str | None
    uses_generation_config: bool
    seed: int
    log_level: str


def parse_engine_options(keywords: Mapping[str, Any], callee: str) -> EngineOptions:
    """Raises: TypeError for a keyword that is no option, ConfigError for a value of the wrong type."""
    unknown = sorted(keywords.keys() - _TYPES.keys())
    if unknown:
        known = ", ".join(field.name for field in dataclasses.fields(EngineOptions))
        raise TypeError(
            f"{callee}() got an unexpected keyword argument {', '.join(map(repr, unknown))}; "
            f"options of the engine are {known}."
        )
    for name, value in keywords.items():
        allowed = typing.get_args(_TYPES[name]) or (_TYPES[name],)
        accepted = (*allowed, int) if float in allowed else allowed
        if not isinstance(value, accepted) or isinstance(value, bool):
            names = " or ".join("None" if each is type(None) else each.__name__ for each in allowed)
            raise ConfigError(f"{name} must be {names}, got {value!r:.80}.")
    return EngineOptions(**keywords)


def resolve_options(
    *,
    model: str,
    revision: str | None,
    chat_template: str | Path | None,
    generation_config: str,
    seed: int,
    log_level: str,
    engine: EngineOptions,
) -> LLMOptions:
    """Raises: ConfigError for the first value that cannot be."""
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {log_level!r}.")
    return LLMOptions(
        model=str(model),
        revision=revision,
        engine_config=dataclasses.replace(engine.config(), seed=seed),
        chat_template=_template_text(chat_template),
        uses_generation_config=uses_generation_config(generation_config),
        seed=seed,
        log_level=log_level.upper(),
    )


def signature_with_options(init: Callable[..., None]) -> inspect.Signature:
    """That of a class with this ``__init__``, with the engine's options by name, for ``help``."""
    signature = inspect.signature(init)
    _, *given = (each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD)
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in dataclasses.fields(EngineOptions)
    ]
    return signature.replace(parameters=[*given, *options])


def _template_text(given: str | Path | None) -> str | None:
    """Jinja source as it is, or that of the file of this name."""
    if isinstance(given, str) and ("{{" in given or "{%" in given):
        check_template(given)
        return given
    return read_template(None if given is None else Path(given).expanduser())
