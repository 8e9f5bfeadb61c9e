"""What ``LLM`` and ``AsyncLLM`` share: their options and the engine they own."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from backfill.core.config import check_log_level
from backfill.core.errors import ConfigError
from backfill.core.options import options_of
from backfill.execution.executor import ExecutorInfo
from backfill.llm.engine import LocalEngine
from backfill.llm.options import (
    in_library_terms,
    parse_engine_options,
    signature_with_options,
    template_text,
)
from backfill.models.resolve import DEFAULT_MODEL
from backfill.protocol.options import RequestOptions


class BaseLLM(ABC):
    """A model in an engine process of its own."""

    _is_offline: ClassVar[bool]  # it has no online requests, so there are no objectives to meet

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        chat_template: str | Path | None = None,
        generation_config: str = "auto",
        seed: int = 0,
        log_level: str = "WARNING",
        **engine_options: object,
    ) -> None:
        """
        Args:
            model: known name, Hugging Face folder, GGUF file or hub id.
            revision: branch, tag or commit of a hub model.
            chat_template: Jinja source, or a file of it, to use instead of the model's.
            generation_config: "auto" takes sampling defaults from the model, "vllm" does not.
            seed: seeds requests that set none; the same requests in the same order get the same seeds.
            log_level: of the engine process, which logs to standard error.
            engine_options: fields of ``backfill.core.config.EngineConfig``.
        Raises: TypeError for an unknown keyword, InvalidOption for a value that is not allowed.
        """
        with in_library_terms():
            engine = parse_engine_options({"policy": "slo", **engine_options}, type(self).__name__)
            if self._is_offline and "policy" not in engine_options:
                engine = engine.for_offline_work()
            check_log_level(log_level)
            if type(seed) is not int:
                raise ConfigError(f"must be a whole number, got {seed!r:.80}.", field="seed")
            options_of(RequestOptions)["generation_config"].check(generation_config)
            engine.validate()
            template = template_text(chat_template)
        self._max_num_seqs = engine.scheduler.max_num_seqs
        self._engine = LocalEngine(
            model=str(model),
            revision=revision,
            config=dataclasses.replace(engine.with_checkpointing(), seed=seed),
            chat_template=template,
            uses_generation_config=generation_config == "auto",
            log_level=log_level.upper(),
        )
        self._open()

    __signature__ = signature_with_options(__init__)

    @abstractmethod
    def _open(self) -> None:
        """Make what the subclass needs beside the engine, which is not started yet."""

    @property
    def info(self) -> ExecutorInfo | None:
        """Context length, vocabulary, KV pool and device; None while no engine runs."""
        return self._engine.info
