"""Generates with a dataset's rows, in engines that Ray places and starts again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from backfill.core.errors import BackfillError, ConfigError
from backfill.llm.options import in_library_terms, parse_engine_options

if TYPE_CHECKING:
    from ray.data import Dataset

RowFunction: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

_OF_LLM = (
    "revision",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "generation_config",
    "seed",
    "log_level",
)


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


@dataclass(frozen=True, slots=True)
class Processor:
    """Maps a dataset to another one, lazily as all of Ray Data; made by ``build_processor``."""

    config: ProcessorConfig
    preprocess: RowFunction | None
    postprocess: RowFunction | None

    def __call__(self, dataset: Dataset) -> Dataset:
        from ray.data import ActorPoolStrategy

        from backfill.ray.engine_actor import BackfillEngine

        config = self.config
        if self.preprocess is not None:
            dataset = dataset.map(self.preprocess)
        others: dict[str, Any] = {}
        if config.runtime_env is not None:
            others["runtime_env"] = dict(config.runtime_env)
        bounds = config.concurrency if isinstance(config.concurrency, tuple) else (config.concurrency,) * 2
        dataset = dataset.map_batches(
            BackfillEngine,
            fn_constructor_kwargs={
                "llm_keywords": config.llm_keywords,
                "continues": config.should_continue_on_error,
            },
            batch_size=config.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(min_size=bounds[0], max_size=bounds[1]),
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus or None,
            **others,
        )
        return dataset if self.postprocess is None else dataset.map(self.postprocess)


def build_processor(
    config: ProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
) -> Processor:
    """A processor that adds what a model generates to each row of a dataset, as Ray Data LLM's does.

    Args:
        preprocess: maps a row to one with ``messages``, ``prompt`` or ``prompt_token_ids``, and perhaps
            ``sampling_params``, a dict of fields of ``SamplingParams``. All its columns are carried over.
        postprocess: maps a row with ``generated_text``, ``generated_tokens``, ``finish_reason``,
            ``num_input_tokens``, ``num_generated_tokens``, ``num_cached_tokens`` and ``time_taken_llm``
            (seconds) to a row of the result.
    Raises: BackfillError without Ray.
    """
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise BackfillError(f"Ray Data cannot be imported ({error}): pip install 'backfill[ray]'.") from None
    for name, function in (("preprocess", preprocess), ("postprocess", postprocess)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function of a row, got {function!r:.80}.")
    return Processor(config, preprocess, postprocess)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
