"""What ``bench coserve`` sends: online requests that arrive by themselves, and offline ones without end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from backfill.bench.record import BenchRequest
from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import burstiness_of_cv, gamma_arrivals
from backfill.workloads.prompts import ASSUMED_VOCABULARY, id_range, random_prompts

# First words of the seeds, so that no kind of request draws what another does.
_ONLINE, _OFFLINE, _READY = range(3)
_READY_TOKENS = 16
_IDS = id_range(ASSUMED_VOCABULARY)


class OfflineMode(StrEnum):
    """How offline work reaches the server."""

    NONE = "none"
    FLEX = "flex"  # completions with service_tier "flex"
    PRIORITY = "priority"  # completions with priority 1, online ones with priority 0, as vLLM reads them
    BATCH = "batch"  # a file of lines through /v1/files and /v1/batches


class LengthRange(NamedTuple):
    """Lengths in tokens, drawn uniformly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, option: str, text: str) -> LengthRange:
        """``256`` or ``256:512``. Raises: ConfigError naming ``option``."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{option} takes tokens as N or LOW:HIGH, at least 1, got {text!r}.")
        return lengths


_ONLINE_INPUT, _ONLINE_OUTPUT = LengthRange(256, 256), LengthRange(64, 64)
_OFFLINE_INPUT, _OFFLINE_OUTPUT = LengthRange(256, 512), LengthRange(32, 128)


@dataclass(frozen=True, slots=True)
class CoserveLoad:
    """One experiment, the same for every policy.

    Args:
        duration_s: of the measurement, which begins after ``warmup_s`` of the same load.
        rate_per_s, cv: of online arrivals; gaps are gamma-distributed.
        offline_concurrency: offline completions kept at the server; unused with BATCH.
        offline_lines: lines of a batch's file; when all are done the file is submitted again.
        drain_s: how long after the measurement its last online requests may still end, offline load going on.
        ttft_slo_s, tpot_slo_s: objectives; the latter holds for every gap between two tokens.
    """

    duration_s: float = 120.0
    warmup_s: float = 10.0
    rate_per_s: float = 0.7
    cv: float = 1.0
    input_len: LengthRange = _ONLINE_INPUT
    output_len: LengthRange = _ONLINE_OUTPUT
    offline_mode: OfflineMode = OfflineMode.FLEX
    offline_input_len: LengthRange = _OFFLINE_INPUT
    offline_output_len: LengthRange = _OFFLINE_OUTPUT
    offline_concurrency: int = 128
    offline_lines: int = 2000
    drain_s: float = 120.0
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.15
    seed: int = 0

    @property
    def end_s(self) -> float:
        """End of the measurement, from the start of the run."""
        return self.warmup_s + self.duration_s

    def validate(self) -> None:
        """Raises: ConfigError."""
        for option, value in (
            ("--duration", self.duration_s),
            ("--rate", self.rate_per_s),
            ("--ttft-slo", self.ttft_slo_s),
            ("--tpot-slo", self.tpot_slo_s),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{option} must be a number above 0, got {value:g}.")
        for option, value in (("--warmup", self.warmup_s), ("--drain-timeout", self.drain_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{option} must be a number of seconds of at least 0, got {value:g}.")
        for option, count in (
            ("--offline-concurrency", self.offline_concurrency),
            ("--offline-lines", self.offline_lines),
        ):
            if count < 1:
                raise ConfigError(f"{option} must be at least 1, got {count}.")
        if not 0 <= self.seed < 1 << 31:
            raise ConfigError(f"--seed must be at least 0 and below 2**31, got {self.seed}.")
        burstiness_of_cv(self.cv)
        if not any(request.due_at_s >= self.warmup_s for request in self.online_requests()):
            raise ConfigError(
                f"--rate {self.rate_per_s:g} leaves no request to measure within --duration "
                f"{self.duration_s:g} s."
            )

    def check_fits(self, max_model_len: int) -> None:
        """Raises: ConfigError when requests could be longer than the server's context, in tokens."""
        sides = [("--input-len and --output-len", self.input_len, self.output_len)]
        if self.offline_mode is not OfflineMode.NONE:
            option = "--offline-input-len and --offline-output-len"
            sides.append((option, self.offline_input_len, self.offline_output_len))
        for options, input_len, output_len in sides:
            if input_len.high + output_len.high > max_model_len:
                raise ConfigError(
                    f"{options} ask for up to {input_len.high + output_len.high} tokens, more than the "
                    f"server's context of {max_model_len}."
                )

    def online_requests(self) -> list[BenchRequest]:
        """In order of arrival, the last at ``end_s``; the same for equal loads."""
        count = round(self.rate_per_s * self.end_s)
        if count < 1:
            return []
        # numpy's older generator: the instants are those of `bench serve` and of vLLM for the same seed.
        arrivals = np.random.RandomState(self.seed)
        due = gamma_arrivals(count, self.rate_per_s, burstiness_of_cv(self.cv), arrivals)
        rng = np.random.default_rng((_ONLINE, self.seed))
        input_lens = rng.integers(*self.input_len, count, endpoint=True)
        output_lens = rng.integers(*self.output_len, count, endpoint=True)
        prompts = random_prompts(input_lens, _IDS, rng)
        return [
            BenchRequest(prompt, len(prompt), int(output_len), float(at))
            for prompt, output_len, at in zip(prompts, output_lens, due, strict=True)
        ]

    def offline_requests(self) -> Iterator[BenchRequest]:
        """Without end; the n-th is the same for equal loads."""
        rng = np.random.default_rng((_OFFLINE, self.seed))
        while True:
            input_len = int(rng.integers(*self.offline_input_len, endpoint=True))
            output_len = int(rng.integers(*self.offline_output_len, endpoint=True))
            yield BenchRequest(rng.integers(*_IDS, input_len).tolist(), input_len, output_len)

    def ready_request(self) -> BenchRequest:
        """A short one for asking whether the server answers, with a prompt no other request begins with."""
        rng = np.random.default_rng((_READY, self.seed))
        return BenchRequest(rng.integers(*_IDS, _READY_TOKENS).tolist(), _READY_TOKENS, 2)

    def online_fields(self) -> dict[str, Any]:
        """Fields of every online request's body beside prompt and length."""
        return {"temperature": 0, **({"priority": 0} if self.offline_mode is OfflineMode.PRIORITY else {})}

    def offline_fields(self) -> dict[str, Any]:
        """Likewise of offline requests."""
        extra: dict[OfflineMode, dict[str, Any]] = {
            OfflineMode.FLEX: {"service_tier": "flex"},
            OfflineMode.PRIORITY: {"priority": 1},
        }
        return {"temperature": 0, **extra.get(self.offline_mode, {})}

    def as_json(self) -> dict[str, Any]:
        """The settings of the load, as the result keeps them."""
        return {
            "duration_s": self.duration_s,
            "warmup_s": self.warmup_s,
            "rate_per_s": self.rate_per_s,
            "cv": self.cv,
            "input_len": list(self.input_len),
            "output_len": list(self.output_len),
            "offline_mode": str(self.offline_mode),
            "offline_input_len": list(self.offline_input_len),
            "offline_output_len": list(self.offline_output_len),
            "offline_concurrency": self.offline_concurrency,
            "seed": self.seed,
        }
