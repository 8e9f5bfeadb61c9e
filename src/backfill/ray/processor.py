"""Generates with a dataset's rows, in engines that Ray places and starts again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from backfill.core.errors import BackfillError
from backfill.ray.config import ProcessorConfig

if TYPE_CHECKING:
    from ray.data import Dataset

RowFunction: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


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
