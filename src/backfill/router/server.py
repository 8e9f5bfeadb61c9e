"""The router process: join engines, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

from backfill.core.clock import WallClock
from backfill.engine.tasks import TaskWatch
from backfill.http.bodies import BodyBudget
from backfill.http.config import ServerConfig
from backfill.http.keys import ApiKeys
from backfill.http.limits import NO_LIMITS, OwnerLimiter
from backfill.http.server import StopSignals, serving, until_none_is_open
from backfill.jobs.config import JobsConfig
from backfill.router.app import RouterState, create_router_app
from backfill.router.config import RouterConfig
from backfill.router.engines import Engines
from backfill.router.line_runner import start_jobs
from backfill.router.metrics import RouterMetrics
from backfill.router.proxy import Proxy

logger = logging.getLogger(__name__)


class RouterServer:
    """One HTTP server in front of engines that run elsewhere.

    Attributes:
        engines: from ``serve`` on.

    Args:
        url: the router's address, shown to a process that finds the data folder locked.
        api_keys: None asks clients for no key.
        jobs_config: None switches the Batch API off.
        on_ready: called when the engines have joined.
        on_second_signal: called before the process ends at once.
    """

    def __init__(
        self,
        server_config: ServerConfig,
        config: RouterConfig,
        *,
        url: str,
        api_keys: ApiKeys | None = None,
        jobs_config: JobsConfig | None = None,
        on_ready: Callable[[Engines], None] | None = None,
        on_second_signal: Callable[[], None] = lambda: None,
    ) -> None:
        self._server_config = server_config
        self._config = config
        self._url = url
        self._api_keys = api_keys
        self._jobs_config = jobs_config
        self._on_ready = on_ready
        self._tasks = TaskWatch()
        self._signals = StopSignals(on_second_signal)
        self.engines: Engines | None = None

    async def run(self, listener: socket.socket) -> signal.Signals | None:
        """Serve until a signal, then drain.

        Returns: the signal, if it came before the engines had joined.
        Raises: as ``serve``.
        """
        self._signals.catch()
        return None if await self.serve(listener) else self._signals.first

    def stop(self) -> None:
        """Let ``serve`` drain and return."""
        self._signals.asked.set()

    async def serve(self, listener: socket.socket) -> bool:
        """Serve until ``stop``. Returns: whether the engines had joined before it.

        Raises: ConfigError, EngineRefused when an engine cannot join; ConfigError when the data folder is
            another server's.
        """
        clock, config = WallClock(), self._server_config
        engines = self.engines = Engines(self._config, clock, self._tasks)
        state: RouterState | None = None
        try:
            if not await self._unless_stopped(engines):
                return False
            metrics = RouterMetrics(engines, clock)
            bodies = BodyBudget(config.max_inflight_body_bytes, config.max_body_bytes)
            keys = self._api_keys
            limits_of = keys.limits_of if keys is not None else lambda _: NO_LIMITS
            proxy = Proxy(
                engines,
                clock,
                metrics,
                OwnerLimiter(limits_of, clock),
                bodies,
                config.max_body_bytes,
                self._config.retry_timeout,
                checks_keys=self._api_keys is not None,
            )
            state = RouterState(config, self._config, engines, proxy, metrics, clock, bodies, self._api_keys)
            if self._jobs_config is not None:
                state.jobs = await start_jobs(
                    self._jobs_config,
                    engines,
                    metrics,
                    self._url,
                    self._tasks,
                    lambda owner: limits_of(owner).weight,
                )
            async with serving(create_router_app(state), config, listener, clock, self._api_keys) as http:
                if self._on_ready is not None:
                    self._on_ready(engines)
                await self._signals.wait(http)
                await self._drain(state)
        finally:
            if state is not None and state.jobs is not None:
                await state.jobs.stop()
            await engines.stop()
        return True

    async def _unless_stopped(self, engines: Engines) -> bool:
        """Let the engines join. Returns: False where a signal came first."""
        joining = asyncio.ensure_future(engines.start())
        try:
            await self._signals.wait(joining)
            if joining.done():
                joining.result()
            return joining.done()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _drain(self, state: RouterState) -> None:
        """Refuse new requests, leave batches for the next start, and let online requests end in time."""
        state.is_draining = True
        timeout_s = self._server_config.shutdown_timeout
        logger.info("shutting down: %d open requests have %g s to end", state.proxy.num_open, timeout_s)
        if state.jobs is not None:
            await state.jobs.pause()
        await until_none_is_open(lambda: state.proxy.num_open, timeout_s)
