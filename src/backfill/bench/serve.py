"""``bench serve``: sends one load to one server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import numpy as np

from backfill.bench.arrivals import ArrivalConfig
from backfill.bench.client import BenchClient, Endpoint, ServerModel, find_model
from backfill.bench.dataset import DatasetConfig, build_load
from backfill.bench.endpoint import EndpointConfig
from backfill.bench.multi_turn import Conversation
from backfill.bench.prompt_text import TextTokenizer
from backfill.bench.record import BenchRequest
from backfill.bench.runner import (
    Run,
    count_requests,
    send_load,
    stopped_by_ctrl_c,
    unlike,
    wait_until_ready,
    warm_up,
)
from backfill.core.config import at_least
from backfill.core.errors import BackfillError
from backfill.core.options import check_types
from backfill.workloads.arrivals import gap_cv, mean_rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How requests are sent.

    Attributes:
        max_concurrency: requests at the server at once; others wait in the client.
        probe_request_rate: one-token requests per second, sent past `max_concurrency`.
        num_warmups: requests sent before the measurement, none of the load's.
        ready_check_timeout_sec: seconds to wait until one request succeeds; 0 does not send it.
    """

    max_concurrency: int | None = None
    probe_request_rate: float = 0.0
    num_warmups: int = 0
    ready_check_timeout_sec: float = 0.0

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if self.max_concurrency is not None:
            at_least("max_concurrency", self.max_concurrency, 1)
        at_least("num_warmups", self.num_warmups, 0)
        at_least("probe_request_rate", self.probe_request_rate, 0)
        at_least("ready_check_timeout_sec", self.ready_check_timeout_sec, 0)


@dataclass(frozen=True, slots=True)
class ServeBenchmark:
    """One load and the server it is for.

    Attributes:
        load_tokenizer: a tokenizer by its name, and the size of its vocabulary. It raises BackfillError.
        note: tells the user something beside the result.
    """

    server: EndpointConfig
    dataset: DatasetConfig
    arrival: ArrivalConfig
    load: LoadConfig
    load_tokenizer: Callable[[str], tuple[TextTokenizer, int]]
    note: Callable[[str], None]

    async def run(
        self, watch: Callable[[Run], AbstractAsyncContextManager[object]]
    ) -> tuple[Run, dict[str, object]]:
        """Send the load.

        Args:
            watch: shows the run while it goes on.
        Returns: the run, and its settings as the result file keeps them.
        Raises: BackfillError when no server answers or the requests cannot be built.
        """
        endpoint = self.server.resolve()
        model = await find_model(endpoint, self.load.ready_check_timeout_sec)
        endpoint = dataclasses.replace(endpoint, model=model.name)
        tokenizer, vocabulary_size = self._find_tokenizer(model)
        requests = build_load(
            self.dataset,
            self.arrival,
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            as_text=endpoint.is_chat,
        )
        self._note_unusual(requests, model)
        async with BenchClient(endpoint, None if tokenizer is None else _token_counter(tokenizer)) as client:
            first = requests[0].messages[0] if isinstance(requests[0], Conversation) else requests[0]
            # The server's prefix cache must hold nothing of the load.
            warming = unlike(first)
            if self.load.ready_check_timeout_sec > 0:
                await wait_until_ready(client, warming, self.load.ready_check_timeout_sec)
            await warm_up(client, [warming] * self.load.num_warmups, self.load.max_concurrency)
            run = await self._send(client, requests, watch)
        return run, self._settings(endpoint, requests)

    async def _send(
        self,
        client: BenchClient,
        requests: Sequence[BenchRequest | Conversation],
        watch: Callable[[Run], AbstractAsyncContextManager[object]],
    ) -> Run:
        run = Run(count_requests(requests))
        with stopped_by_ctrl_c() as stop:
            async with watch(run):
                return await send_load(
                    client,
                    requests,
                    stop=stop,
                    run=run,
                    max_concurrency=self.load.max_concurrency,
                    probe_rate_per_s=self.load.probe_request_rate,
                )

    def _find_tokenizer(self, model: ServerModel) -> tuple[TextTokenizer | None, int | None]:
        """The tokenizer asked for, else that of the server's model if it is on this machine or the hub."""
        for name in filter(None, (self._tokenizer_name, model.root)):
            try:
                return self.load_tokenizer(name)
            except BackfillError:
                if self.dataset.tokenizer is not None:
                    raise
        return None, None

    @property
    def _tokenizer_name(self) -> str | None:
        return self.dataset.tokenizer or self.server.model

    def _note_unusual(self, requests: Sequence[BenchRequest | Conversation], model: ServerModel) -> None:
        if (limit := model.max_model_len) is not None:
            too_long = sum(request.total_tokens > limit for request in requests)
            if too_long:
                kind = "conversations" if self.dataset.dataset_name == "multi_turn" else "requests"
                self.note(
                    f"{too_long} of {len(requests)} {kind} exceed the server's context of {limit} tokens."
                )
        if len(requests) < self.dataset.num_prompts:
            self.note(f"the trace has only {len(requests)} requests to send.")

    def _settings(
        self, endpoint: Endpoint, requests: Sequence[BenchRequest | Conversation]
    ) -> dict[str, object]:
        instants = np.array([request.due_at_s for request in requests])
        phases = [[phase.duration_s, phase.rate_per_s] for phase in self.arrival.phase_list()]
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": "openai-chat" if endpoint.is_chat else "openai",
            "base_url": endpoint.base_url,
            "model_id": endpoint.model,
            "tokenizer_id": self._tokenizer_name,
            "dataset_name": self.dataset.dataset_name,
            "num_prompts": len(requests),
            **self.dataset.workload_settings(),
            "request_rate": self.arrival.request_rate,
            "burstiness": self.arrival.gamma_shape,
            "phases": phases or None,
            "ramp": None if self.arrival.ramp is None else list(self.arrival.ramp),
            "max_concurrency": self.load.max_concurrency,
            "seed": self.dataset.seed,
            "offered_rate": mean_rate_per_s(instants),
            "offered_cv": gap_cv(instants),
            "label": self.server.backend,
        }


def _token_counter(tokenizer: TextTokenizer) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
