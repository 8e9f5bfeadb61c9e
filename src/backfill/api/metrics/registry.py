"""The registry behind ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from backfill.api.metrics.engine import EngineMetrics
from backfill.api.metrics.requests import RequestMetrics
from backfill.api.metrics.server import HttpMetrics, LoopLag, ProcessMetrics
from backfill.core.slo import SLO
from backfill.execution.executor import ExecutorInfo
from backfill.generation.timeline import RequestRecord
from backfill.http.metrics import JobMetrics
from backfill.preparation.client import PreparationClient


class Metrics:
    """The server's registry, by group. Names begin with ``backfill:``; times are in seconds.

    Args:
        model_name: value of the ``model_name`` label.
        info: the engine's facts, for bucket bounds and ``cache_config_info``.
        slo: the server's own objectives, which become bucket bounds.
        jobs: None where the Batch API is switched off.
        preparation: the process that prepares large bodies; its state is read when scraped.
        task_failures: how often each long-lived task, by name, ended with an exception; read when scraped.
        trace: is called with each request that has ended.
        vllm_names: expose the metrics that routers and autoscalers read under vLLM's names too.
    """

    def __init__(
        self,
        model_name: str,
        info: ExecutorInfo,
        *,
        slo: SLO,
        jobs: JobMetrics | None = None,
        preparation: PreparationClient | None = None,
        task_failures: Mapping[str, int] | None = None,
        vllm_names: bool = False,
        trace: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        # Collectors name no metrics when they are registered: ``name[]`` asks all of them.
        self.registry = CollectorRegistry(support_collectors_without_names=True)
        self.loop_lag = LoopLag(self.registry, model_name)
        if jobs is not None:
            self.registry.register(jobs)
        labels = {"model_name": model_name, "engine": "0"}
        self.engine = EngineMetrics(self.registry, labels, info, slo, vllm_names=vllm_names)
        self.requests = RequestMetrics(self.registry, labels, info.max_model_len, slo, trace)
        self.http = HttpMetrics(self.registry)
        self.registry.register(ProcessMetrics(preparation, task_failures or {}))
