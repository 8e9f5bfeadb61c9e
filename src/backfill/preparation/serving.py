"""The processes behind the OpenAI API: an engine, and those that prepare requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backfill.core.errors import ConfigError
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready
from backfill.engine.supervisor import EngineSupervisor
from backfill.engine.tasks import TaskWatch
from backfill.generation.generator import TextGenerator
from backfill.generation.timeline import Observer
from backfill.preparation.client import PreparationClient
from backfill.preparation.messages import PreparationSetup
from backfill.protocol.options import check_template
from backfill.protocol.preparer import EngineFacts, RequestPreparer
from backfill.protocol.service import CompletionService

logger = logging.getLogger(__name__)


class ServingProcesses:
    """Owns an engine, started again when it dies, and preparation. One event loop owns it.

    The tokenizer is loaded while they start.

    ``client`` is the engine's, which may have been launched.
    """

    supervisor: EngineSupervisor  # from ``start`` on
    _supervising: asyncio.Task[None]
    _loading: asyncio.Task[RequestPreparer]

    def __init__(self, client: EngineClient, setup: PreparationSetup, tasks: TaskWatch | None = None) -> None:
        self.client = client
        self.preparation = PreparationClient(setup, tasks)

    def start(
        self,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_lost: Callable[[], None],
        on_offline_suspended: Callable[[bool], None] | None = None,
    ) -> asyncio.Task[None]:
        """Start the engine. ``preparation`` is started by the caller.

        Args:
            on_ready, on_lost, on_offline_suspended: as for ``EngineSupervisor``.

        Returns: the task of ``EngineSupervisor.run``. It raises, too, what loading the tokenizer raises.
        """
        self.supervisor = EngineSupervisor(
            self.client, on_ready=on_ready, on_lost=on_lost, on_offline_suspended=on_offline_suspended
        )
        self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        self._supervising = asyncio.create_task(self._supervise())
        return self._supervising

    async def _supervise(self) -> None:
        engine = asyncio.create_task(self.supervisor.run())
        try:
            await asyncio.wait({engine, self._loading}, return_when=asyncio.FIRST_COMPLETED)
            if self._loading.done():
                self._loading.result()  # without a tokenizer the engine would be loaded for nothing
            await engine
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

    async def stop_engine(self, *, at_once: bool = False) -> None:
        """End the engine, ``at_once`` without asking it. The preparation processes still answer."""
        self._supervising.cancel()
        self._loading.cancel()
        await asyncio.gather(self._supervising, self._loading, return_exceptions=True)
        if at_once:
            self.client.kill()
        await self.client.stop()

    async def loaded(self) -> RequestPreparer:
        """The preparer of this process, once its tokenizer is loaded. Raises: ModelError."""
        return await self._loading

    def configure(self, preparer: RequestPreparer, facts: EngineFacts) -> None:
        """Prepare requests for this engine, here and in the preparation processes."""
        preparer.facts = facts
        self.preparation.configure(facts)

    def create_service(self, preparer: RequestPreparer, observer: Observer) -> CompletionService:
        generator = TextGenerator(self.client, preparer.tokenizer, observer)
        return CompletionService(preparer.tokenizer, generator)

    def _load(self) -> RequestPreparer:
        setup = self.preparation.setup
        tokenizer = setup.load_tokenizer()
        for template in tokenizer.chat_templates:
            try:
                check_template(template, " of the model")
            except ConfigError as error:  # completions need none
                logger.warning("%s: chats are refused", str(error).replace("`", ""))
        return setup.create_preparer(tokenizer)
