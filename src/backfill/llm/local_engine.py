"""The engine process behind ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from backfill.core.config import EngineConfig
from backfill.core.errors import EngineDead, RequestAborted
from backfill.costs.profile import CostProfile
from backfill.engine.client import EngineClient
from backfill.engine.options import check_profile
from backfill.execution.executor import ExecutorInfo
from backfill.generation.generator import TextGenerator
from backfill.generation.timeline import Observer
from backfill.generation.tokenizer import Tokenizer
from backfill.llm.errors import in_library_terms, with_keywords
from backfill.llm.options import LLMOptions
from backfill.llm.outputs import RequestOutput
from backfill.llm.progress import FetchLines
from backfill.llm.request import AbortHandle, PreparedRequest, Preparer, run_request
from backfill.llm.sampling_params import SamplingParams
from backfill.models.config import ModelConfig
from backfill.models.generation_config import GenerationDefaults
from backfill.models.resolve import resolve_model
from backfill.scheduling.objectives import check_server_slo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a restarted engine shares with the one before."""

    tokenizer: Tokenizer
    generator: TextGenerator
    default_params: SamplingParams


class LocalEngine:
    """An engine process with tokenizer and preparer, started when first needed. One event loop owns it.

    The next request restarts an engine that has died. In a fork of the process that created it, only
    ``check_usable``, ``close`` and ``abandon`` may be called.
    """

    def __init__(self, options: LLMOptions) -> None:
        self._options = options
        self.client: EngineClient | None = None
        self._loaded: LoadedModel | None = None
        self._preparer: Preparer | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def loaded(self) -> LoadedModel:
        assert self._loaded is not None, "started before"
        return self._loaded

    @property
    def preparer(self) -> Preparer:
        assert self._preparer is not None, "started before"
        return self._preparer

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
                with in_library_terms():
                    await self._start()

    async def close(self) -> None:
        """End the engine, also while it starts; requests in flight raise EngineDead.

        It cannot be started again. In a fork nothing happens, as the engine is the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        if self.client is not None:
            await self.client.stop()

    def abandon(self) -> None:
        """``close`` without the event loop."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        if self.client is not None:
            self.client.abandon()

    def abort(self, handle: AbortHandle) -> None:
        """Abort the request of this handle, also before it runs; it yields a last output."""
        handle.is_aborted = True
        if self.client is not None:
            self.client.interrupt_group(handle, RequestAborted("The request was aborted."))

    def run(self, request: PreparedRequest, handle: AbortHandle) -> AsyncGenerator[RequestOutput, None]:
        return run_request(request, self.loaded.generator, self.loaded.tokenizer, handle)

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
            config = await asyncio.to_thread(_find_model, self._options)
            self.check_usable()  # it may have been closed during a download
            self.client = EngineClient(config, on_profile=self._on_profile, log_level=self._options.log_level)
        elif self._loaded is not None:
            logger.warning("the engine has died and is restarted")
        client = self.client
        # While the engine starts, which takes about as long.
        loading = asyncio.ensure_future(asyncio.to_thread(self._load, client))
        try:
            ready = await client.start()
            if self._loaded is None:
                for warning in check_server_slo(self._options.engine_config.scheduler, ready.profile):
                    logger.warning(with_keywords(warning))
            self._loaded = await loading
            self.check_usable()
        except BaseException:
            loading.cancel()
            await client.stop()
            raise
        seeds = random.Random(self._options.seed)
        self._preparer = Preparer(
            self._loaded.tokenizer, ready.info, ready.profile, client.config.scheduler, seeds
        )

    def _on_profile(self, profile: CostProfile) -> None:
        if self._preparer is not None:
            self._preparer.profile = profile

    def _load(self, client: EngineClient) -> LoadedModel:
        """Load the tokenizer and the sampling defaults. Raises: ModelError."""
        if self._loaded is not None:
            return self._loaded
        folder = Path(client.config.model_dir)
        tokenizer = Tokenizer.from_folder(folder, chat_template=self._options.chat_template)
        from_model = self._options.uses_generation_config
        defaults = GenerationDefaults.from_folder(folder) if from_model else GenerationDefaults()
        return LoadedModel(
            tokenizer, TextGenerator(client, tokenizer, Observer()), SamplingParams.recommended(defaults)
        )


def _find_model(options: LLMOptions) -> EngineConfig:
    """The configuration with the model's folder. Downloads the model if needed. Raises: BackfillError."""
    folder = resolve_model(options.model, revision=options.revision, progress=FetchLines(options.model))
    ModelConfig.from_folder(folder)  # refuses a model before the engine starts
    config = dataclasses.replace(options.engine_config, model_dir=str(folder))
    check_profile(config)
    return config
