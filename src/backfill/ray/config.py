"""How a dataset is processed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backfill.core.errors import ConfigError
from backfill.llm.options import in_library_terms, parse_engine_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorConfig:
    """An engine for rows of a dataset; names are those of Ray Data LLM where it has them.

    Attributes:
        model_source: known name, Hugging Face folder, GGUF file or hub id. Each node must find it there.
        engine_kwargs: keywords of ``LLM``.
        concurrency: engines, each an actor; or (least, most), between which Ray goes by the rows that wait.
        batch_size: rows that an engine is given at a time; it has up to four such batches at once, so that
            it is not idle while one ends.
        num_cpus, num_gpus: of the node, for one engine. On CPU the engine has as many threads.
        should_continue_on_error: a row that cannot be served has its error in the column
            ``__inference_error__`` (empty in others), and null in those that are generated. Otherwise it ends
            the pipeline.
        runtime_env: of the actors, as in Ray.
    Raises: InvalidOption and TypeError, also for the engine's options.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    num_cpus: float = 1
    num_gpus: float = 0
    should_continue_on_error: bool = False
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        with in_library_terms():
            options = {name: value for name, value in self.engine_kwargs.items() if name not in _OF_LLM}
            parse_engine_options(options, "engine_kwargs of ProcessorConfig").validate()
            if not self.model_source:
                raise ConfigError("must name a model, got ''.", field="model_source")
            if "model" in self.engine_kwargs:
                raise ConfigError("has no model: `model_source` names it.", field="engine_kwargs")
            if not _is_count(self.batch_size):
                raise ConfigError(f"must be at least 1, got {self.batch_size!r}.", field="batch_size")
            if self.engine_kwargs.get("executor", "process") != "process":
                raise ConfigError(
                    "has no `executor` but process: Ray places the engines.", field="engine_kwargs"
                )
            bounds = self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency,)
            if not all(map(_is_count, bounds)) or len(bounds) > 2 or bounds[0] > bounds[-1]:
                raise ConfigError(
                    f"must be a number of engines of at least 1, or (least, most), got {self.concurrency!r}.",
                    field="concurrency",
                )
            for name in ("num_cpus", "num_gpus"):
                if not getattr(self, name) >= 0:
                    raise ConfigError(f"must be at least 0, got {getattr(self, name)!r}.", field=name)

    @property
    def llm_keywords(self) -> dict[str, Any]:
        """Keywords of the engine's ``AsyncLLM``."""
        given = {"model": self.model_source, **self.engine_kwargs}
        if not self.num_gpus and "threads" not in given:
            given["threads"] = max(1, int(self.num_cpus))
        return given


_OF_LLM = ("revision", "chat_template", "generation_config", "seed", "log_level")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
