"""What ``LLM`` and ``AsyncLLM`` share: their options, and the engine process that they own."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from backfill.core.config import EngineConfig, check_log_level
from backfill.core.errors import BackfillError, ConfigError, EngineDead, RequestAborted
from backfill.core.options import options_of
from backfill.core.sampling import SamplingParams
from backfill.costs.profile import CostProfile
from backfill.engine.client import EngineClient
from backfill.engine.options import check_engine
from backfill.execution.executor import ExecutorInfo
from backfill.execution.grammars import GrammarCompiler
from backfill.generation.generator import TextGenerator
from backfill.generation.message_format import ReasoningParserName, ToolCallParserName
from backfill.generation.timeline import Observer
from backfill.generation.tokenizer import Tokenizer
from backfill.llm.options import (
    in_library_terms,
    parse_engine_options,
    signature_with_options,
    template_text,
    with_keywords,
)
from backfill.llm.progress import FetchLines
from backfill.llm.request import AbortHandle, Preparer
from backfill.models.generation_config import GenerationDefaults
from backfill.models.resolve import DEFAULT_MODEL, resolve_model
from backfill.protocol.options import RequestOptions
from backfill.scheduling.objectives import check_server_slo

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class LocalEngine:
    """An engine process with tokenizer and preparer, started when first needed. One event loop owns it.

    The next request restarts an engine that has died. In a fork of the process that created it, only
    ``check_usable``, ``close`` and ``abandon`` may be called.

    Attributes:
        config: complete but for the model's folder.
        chat_template: Jinja source that replaces the model's own.
        tool_call_parser, reasoning_parser: as in ``RequestOptions``.
        generator, default_params, preparer: from ``start`` on.
    """

    model: str
    revision: str | None
    config: EngineConfig
    chat_template: str | None
    tool_call_parser: ToolCallParserName
    reasoning_parser: ReasoningParserName
    uses_generation_config: bool
    log_level: str
    client: EngineClient | None = field(default=None, init=False)
    generator: TextGenerator = field(init=False)
    default_params: SamplingParams = field(init=False)
    preparer: Preparer = field(init=False)
    _loading: asyncio.Future[tuple[TextGenerator, SamplingParams]] | None = field(default=None, init=False)
    _was_ready: bool = field(default=False, init=False)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _is_closed: bool = field(default=False, init=False)
    _pid: int = field(default_factory=os.getpid, init=False)

    @property
    def info(self) -> ExecutorInfo | None:
        """None while no engine runs."""
        return None if self.client is None else self.client.info

    async def start(self) -> None:
        """Return once an engine is ready.

        Raises: BackfillError with the reason if it cannot start, EngineDead after ``close``.
        """
        self.check_usable()
        async with self._starting:
            self.check_usable()
            if self.info is None:
                try:
                    with in_library_terms():
                        await self._start()
                except BackfillError as error:  # whose message says all; its frames are of threads
                    raise error.with_traceback(None) from None

    async def close(self) -> None:
        """End the engine, also while it starts; requests in flight raise EngineDead.

        It cannot be started again. In a fork nothing happens, as the engine is the parent's.
        """
        if os.getpid() == self._pid:
            self._is_closed = True
            if self.client is not None:
                await self.client.stop()

    def abandon(self) -> None:
        """``close`` without the event loop."""
        if os.getpid() == self._pid:
            self._is_closed = True
            if self.client is not None:
                self.client.abandon()

    def abort(self, handle: AbortHandle) -> None:
        """Abort the request of this handle, also before it runs; it yields a last output."""
        handle.is_aborted = True
        if self.client is not None:
            self.client.interrupt_group(handle, RequestAborted("The request was aborted."))

    def check_usable(self) -> None:
        """Raises: EngineDead after ``close``, and in a fork of the process that created it."""
        if os.getpid() != self._pid:
            raise EngineDead(
                f"This engine belongs to process {self._pid}, and a fork of it cannot use it; "
                "make another one."
            )
        if self._is_closed:
            raise EngineDead("This engine was closed; make another one.")

    async def _start(self) -> None:
        if self.client is None:
            config = await asyncio.to_thread(self._find_model)
            self.check_usable()  # it may have been closed during a download
            self.client = EngineClient(config, on_profile=self._on_profile, log_level=self.log_level)
        elif self._was_ready:
            logger.warning("the engine has died and is restarted")
        client = self.client
        if self._loading is None:  # while the engine starts, which takes about as long
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load, client))
        try:
            ready = await client.start()
            if not self._was_ready:
                for warning in check_server_slo(self.config.scheduler, ready.profile):
                    logger.warning(with_keywords(warning))
            self.generator, self.default_params = await self._loading
            self.check_usable()
        except BaseException:
            if not self._was_ready:
                self._loading.cancel()
                self._loading = None
            await client.stop()
            raise
        tokenizer, seeds = self.generator.tokenizer, random.Random(self.config.seed)
        info = ready.info
        grammars = GrammarCompiler(Path(client.config.model_dir), info.vocab_size, info.end_token_ids)
        scheduler = client.config.scheduler
        self.preparer = Preparer(tokenizer, info, ready.profile, scheduler, seeds, grammars)
        self._was_ready = True

    def _on_profile(self, profile: CostProfile) -> None:
        if self._was_ready:
            self.preparer.profile = profile

    def _find_model(self) -> EngineConfig:
        """The configuration with the model's folder. Downloads it if needed. Raises: BackfillError."""
        folder = resolve_model(self.model, revision=self.revision, progress=FetchLines(self.model))
        config = replace(self.config, model_dir=str(folder))
        check_engine(config)
        return config

    def _load(self, client: EngineClient) -> tuple[TextGenerator, SamplingParams]:
        """Load the tokenizer and the sampling defaults. Raises: ModelError."""
        folder = Path(client.config.model_dir)
        tokenizer = Tokenizer.from_folder(
            folder,
            chat_template=self.chat_template,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
        )
        defaults = GenerationDefaults()
        if self.uses_generation_config:
            defaults = GenerationDefaults.from_folder(folder)
        return TextGenerator(client, tokenizer, Observer()), SamplingParams(**defaults.recommended)


class BaseLLM(ABC):
    """A model in an engine process of its own."""

    _is_offline: ClassVar[bool]  # it has no online requests, so there are no objectives to meet

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        chat_template: str | Path | None = None,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
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
            tool_call_parser: how the model writes calls of tools. "auto": as its chat template does.
            reasoning_parser: how the model marks its reasoning. "auto": as its chat template does.
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
            options = options_of(RequestOptions)
            options["generation_config"].check(generation_config)
            options["tool_call_parser"].check(tool_call_parser)
            options["reasoning_parser"].check(reasoning_parser)
            engine.validate()
            template = template_text(chat_template)
        self._max_num_seqs = engine.scheduler.max_num_seqs
        self._engine = LocalEngine(
            model=str(model),
            revision=revision,
            config=replace(engine.with_checkpointing(), seed=seed),
            chat_template=template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
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
