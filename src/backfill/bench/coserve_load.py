"""The load of ``bench coserve``: online requests at their arrival times, and endless offline requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from backfill.bench.record import BenchRequest
from backfill.core.errors import ConfigError
from backfill.core.options import bounded, check_types
from backfill.workloads.arrivals import burstiness_of_cv, gamma_arrivals

OfflineMode = Literal["none", "flex", "priority", "batch"]
LengthField = Literal["input_len", "output_len", "offline_input_len", "offline_output_len"]

# Each kind of request has a seed that begins with its own number, so that no two draw the same.
_ONLINE, _OFFLINE, _READY = range(3)
_READY_TOKENS = 16
# In most vocabularies lower ids are special tokens and bytes. Nearly all are at least Llama's 32,000.
_IDS = 1000, 32_000


class LengthRange(NamedTuple):
    """Lengths in tokens, drawn uniformly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, field: str, text: str) -> LengthRange:
        """``256`` or ``256:512``. Raises: ConfigError naming ``field``."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"`{field}` takes tokens as N or LOW:HIGH, at least 1, got {text!r}.")
        return lengths

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoserveLoad:
    """One experiment, the same for every policy.

    Attributes:
        duration: seconds to measure, after `warmup`.
        warmup: seconds of the same load before the measurement.
        rate: online requests per second.
        cv: coefficient of variation of the gaps between online requests: 1 is Poisson, 0 is constant.
        input_len: tokens of an online prompt: N, or LOW:HIGH drawn uniformly.
        output_len: tokens of an online output.
        offline_mode: how offline work is sent. flex: completions with service_tier flex; priority:
            completions with priority 1, online ones with 0, as in vLLM; batch: through the Batch API; none:
            no offline work.
        offline_input_len: tokens of an offline prompt.
        offline_output_len: tokens of an offline output.
        offline_concurrency: offline requests kept at the server. For a batch, the server chooses.
        offline_lines: lines of a batch's file; the next batch, of other lines, follows when all are done.
        ttft_slo: objective in seconds, also of servers started here.
        tpot_slo: objective of every gap between two tokens in seconds, also of servers started here.
        drain_timeout: seconds that online requests may take after the measurement. Offline load continues.
        seed: seed of arrivals, lengths and prompts; each round takes the next one.
    """

    duration: float = bounded(120.0, above=0)
    warmup: float = bounded(10.0, least=0)
    rate: float = bounded(0.7, above=0)
    cv: float = 1.0
    input_len: str = "256"
    output_len: str = "64"
    offline_mode: OfflineMode = "flex"
    offline_input_len: str = "256:512"
    offline_output_len: str = "32:128"
    offline_concurrency: int = bounded(128, least=1)
    offline_lines: int = bounded(2000, least=1)
    ttft_slo: float = bounded(1.0, above=0)
    tpot_slo: float = bounded(0.15, above=0)
    drain_timeout: float = bounded(120.0, least=0)
    seed: int = bounded(0, least=0, below=1 << 31)

    @property
    def end_s(self) -> float:
        """End of the measurement, from the start of the run."""
        return self.warmup + self.duration

    def lengths(self, field: LengthField) -> LengthRange:
        """Raises: ConfigError for text of another shape."""
        return LengthRange.parse(field, getattr(self, field))

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        for length in get_args(LengthField):
            self.lengths(length)
        burstiness_of_cv(self.cv)
        if not any(request.due_at_s >= self.warmup for request in self.online_requests()):
            raise ConfigError(
                f"`rate` {self.rate:g} leaves no request to measure within `duration` {self.duration:g} s."
            )

    def check_fits(self, max_model_len: int) -> None:
        """Raises: ConfigError when a request could exceed the server's context, in tokens."""
        sides: list[tuple[LengthField, LengthField]] = [("input_len", "output_len")]
        if self.offline_mode != "none":
            sides.append(("offline_input_len", "offline_output_len"))
        for input_len, output_len in sides:
            num_tokens = self.lengths(input_len).high + self.lengths(output_len).high
            if num_tokens > max_model_len:
                raise ConfigError(
                    f"`{input_len}` and `{output_len}` ask for up to {num_tokens} tokens, more than the "
                    f"server's context of {max_model_len}."
                )

    def online_requests(self) -> list[BenchRequest]:
        """The online requests in order of arrival, the last at ``end_s``; the same for equal loads."""
        count = round(self.rate * self.end_s)
        if count < 1:
            return []
        # numpy's older generator gives vLLM's instants for the same seed.
        arrivals = np.random.RandomState(self.seed)
        due = gamma_arrivals(count, self.rate, burstiness_of_cv(self.cv), arrivals)
        rng = np.random.default_rng((_ONLINE, self.seed))
        input_lens = rng.integers(*self.lengths("input_len"), count, endpoint=True)
        output_lens = rng.integers(*self.lengths("output_len"), count, endpoint=True)
        prompts = [rng.integers(*_IDS, int(input_len)).tolist() for input_len in input_lens]
        return [
            BenchRequest(prompt, len(prompt), int(output_len), float(at))
            for prompt, output_len, at in zip(prompts, output_lens, due, strict=True)
        ]

    def offline_requests(self) -> Iterator[BenchRequest]:
        """An endless sequence; the n-th request is the same for equal loads."""
        inputs, outputs = self.lengths("offline_input_len"), self.lengths("offline_output_len")
        rng = np.random.default_rng((_OFFLINE, self.seed))
        while True:
            input_len = int(rng.integers(*inputs, endpoint=True))
            output_len = int(rng.integers(*outputs, endpoint=True))
            yield BenchRequest(rng.integers(*_IDS, input_len).tolist(), input_len, output_len)

    def ready_request(self) -> BenchRequest:
        """A short request that shows whether the server answers. No other prompt begins with its prompt."""
        rng = np.random.default_rng((_READY, self.seed))
        return BenchRequest(rng.integers(*_IDS, _READY_TOKENS).tolist(), _READY_TOKENS, 2)

    def online_fields(self) -> dict[str, object]:
        """Fields of every online request's body beside prompt and length."""
        return {"temperature": 0, **({"priority": 0} if self.offline_mode == "priority" else {})}

    def offline_fields(self) -> dict[str, object]:
        """Fields of every offline request's body beside prompt and length."""
        extra: dict[str, dict[str, object]] = {"flex": {"service_tier": "flex"}, "priority": {"priority": 1}}
        return {"temperature": 0, **extra.get(self.offline_mode, {})}

    def as_json(self) -> dict[str, object]:
        """The settings of the load, as the result keeps them."""
        return {
            "duration_s": self.duration,
            "warmup_s": self.warmup,
            "rate_per_s": self.rate,
            "cv": self.cv,
            **{field: list(self.lengths(field)) for field in get_args(LengthField)},
            "offline_mode": self.offline_mode,
            "offline_concurrency": self.offline_concurrency,
            "seed": self.seed,
        }
