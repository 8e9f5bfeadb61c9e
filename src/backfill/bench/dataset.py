"""Builds the requests of a run: prompts and lengths of a dataset, and the instants at which they arrive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np

from backfill.bench.record import BenchRequest
from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import (
    Instants,
    Phase,
    RandomSource,
    gamma_arrivals,
    phased_arrivals,
    ramp_arrivals,
    rescaled_to_rate,
)
from backfill.workloads.lengths import LengthDistribution
from backfill.workloads.prompts import ASSUMED_VOCABULARY, id_range, prefix_sharing_prompts, random_prompts
from backfill.workloads.traces import Trace, read_conversations, read_trace

# What vLLM's benchmark keeps of ShareGPT.
_SHAREGPT_MIN_TOKENS = 4
_SHAREGPT_MAX_INPUT_TOKENS = 1024
_SHAREGPT_MAX_TOTAL_TOKENS = 2048


# vLLM's defaults.
_DEFAULT_INPUT = LengthDistribution(1024)
_DEFAULT_OUTPUT = LengthDistribution(128)


class DatasetName(StrEnum):
    """Where prompts and lengths come from."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    TRACE = "trace"


class TextTokenizer(Protocol):
    """The part of a tokenizer that building prompts needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Which requests to build.

    Args:
        input_len, output_len: of RANDOM; of the others ``fixed_output_len`` replaces the recorded lengths.
        prefix_tokens: random tokens in front of every RANDOM prompt, the same for all.
        max_total_tokens: longer requests are left out of a trace or of ShareGPT.
        seconds_per_unit, hash_block_tokens: units of a JSONL trace.
    """

    name: DatasetName = DatasetName.RANDOM
    path: Path | None = None
    num_prompts: int = 1000
    input_len: LengthDistribution = _DEFAULT_INPUT
    output_len: LengthDistribution = _DEFAULT_OUTPUT
    fixed_output_len: int | None = None
    prefix_tokens: int = 0
    max_total_tokens: int | None = None
    seconds_per_unit: float = 0.001
    hash_block_tokens: int = 512
    seed: int = 0

    def validate(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, got {self.num_prompts}.")
        if self.name is not DatasetName.RANDOM and self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs --dataset-path.")
        if self.fixed_output_len is not None and self.fixed_output_len < 1:
            raise ConfigError(f"--output-len must be at least 1 token, got {self.fixed_output_len}.")
        if self.hash_block_tokens < 1 or not self.seconds_per_unit > 0:
            raise ConfigError("--trace-hash-block-tokens and --trace-seconds-per-unit must be above 0.")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"--seed must be at least 0 and below 2**32, got {self.seed}.")
        self.input_len.validate("--random-input-len")
        self.output_len.validate("--random-output-len")


@dataclass(frozen=True, slots=True)
class ArrivalConfig:
    """When requests arrive. ``phases`` and ``ramp`` exclude a rate and each other.

    Args:
        rate_per_s: inf sends all at once, or at a trace's own instants where it has them.
        ramp: rates at the first and the last request.
        is_self_timed: a trace with times keeps them, stretched to ``rate_per_s`` where that is finite.
    """

    rate_per_s: float = math.inf
    burstiness: float = 1.0
    phases: tuple[Phase, ...] = ()
    ramp: tuple[float, float] | None = None
    is_ramp_exponential: bool = False
    is_self_timed: bool = True

    def validate(self) -> None:
        """Raises: ConfigError for settings that exclude each other or are out of range."""
        chosen = [math.isfinite(self.rate_per_s), bool(self.phases), self.ramp is not None]
        if sum(chosen) > 1:
            raise ConfigError("Only one of --request-rate, --phases and --ramp-up-strategy can be given.")
        self.instants(1, None, np.random.default_rng(0))

    def instants(self, count: int, recorded: Instants | None, rng: RandomSource) -> Instants:
        """Arrival instants of ``count`` requests; ``recorded`` are those of the trace, if any."""
        if self.phases:
            return phased_arrivals(count, self.phases, self.burstiness, rng)
        if self.ramp is not None:
            return ramp_arrivals(
                count, *self.ramp, self.burstiness, rng, exponential=self.is_ramp_exponential
            )
        if recorded is not None and self.is_self_timed:
            return recorded if math.isinf(self.rate_per_s) else rescaled_to_rate(recorded, self.rate_per_s)
        return gamma_arrivals(count, self.rate_per_s, self.burstiness, rng)


def build_requests(
    dataset: DatasetConfig,
    arrival: ArrivalConfig,
    *,
    tokenizer: TextTokenizer | None = None,
    vocabulary_size: int | None = None,
    as_text: bool = False,
) -> list[BenchRequest]:
    """The requests of a run, in order of arrival; the same for equal arguments.

    Lengths, prompts and arrivals draw from generators of their own, so that changing one leaves the others.

    Args:
        vocabulary_size: bounds random ids; without it that of Llama is assumed.
        as_text: prompts must be text, as chat needs; random ones then need the tokenizer.
    Raises: ConfigError for settings out of range, a dataset that cannot be read, or a tokenizer missing.
    """
    dataset.validate()
    arrival.validate()
    of_lengths, of_prompts = np.random.default_rng(dataset.seed).spawn(2)
    # numpy's older generator, because `vllm bench serve` draws from it: equal seeds give equal arrivals.
    of_arrivals = np.random.RandomState(dataset.seed)
    recorded = None
    if dataset.name is DatasetName.SHAREGPT and not str(dataset.path).endswith(".csv"):
        requests = _conversation_requests(dataset, tokenizer, of_lengths)
    else:
        trace = _trace(dataset, of_lengths)
        recorded = trace.arrivals_at_s
        requests = _synthetic_requests(dataset, trace, tokenizer, vocabulary_size, as_text, of_prompts)
    due = arrival.instants(len(requests), recorded, of_arrivals)
    return [
        dataclasses.replace(request, due_at_s=float(at)) for request, at in zip(requests, due, strict=True)
    ]


def _trace(dataset: DatasetConfig, rng: np.random.Generator) -> Trace:
    """Lengths of the requests: drawn, or the trace's; with times its first requests, else a sample."""
    count = dataset.num_prompts
    if dataset.name is DatasetName.RANDOM:
        return Trace(dataset.input_len.sample(count, rng), dataset.output_len.sample(count, rng))
    assert dataset.path is not None
    trace = read_trace(dataset.path, seconds_per_unit=dataset.seconds_per_unit)
    if dataset.fixed_output_len is not None:
        output = np.full(len(trace), dataset.fixed_output_len, dtype=np.int64)
        trace = dataclasses.replace(trace, output_lens=output)
    if dataset.max_total_tokens is not None:
        fits = trace.input_lens + trace.output_lens <= dataset.max_total_tokens
        if not fits.any():
            raise ConfigError(
                f"{dataset.path}: no request of at most --max-total-len {dataset.max_total_tokens} tokens."
            )
        trace = trace.select(np.flatnonzero(fits))
    if trace.arrivals_at_s is not None:
        return trace.select(slice(count))
    return trace.select(rng.choice(len(trace), count, replace=count > len(trace)))


def _synthetic_requests(
    dataset: DatasetConfig,
    trace: Trace,
    tokenizer: TextTokenizer | None,
    vocabulary_size: int | None,
    as_text: bool,
    rng: np.random.Generator,
) -> list[BenchRequest]:
    ids = id_range(vocabulary_size or ASSUMED_VOCABULARY)
    if trace.hash_ids is not None:
        prompts = prefix_sharing_prompts(
            trace.input_lens, trace.hash_ids, dataset.hash_block_tokens, ids, dataset.seed
        )
    else:
        prompts = random_prompts(trace.input_lens, ids, rng, prefix_tokens=dataset.prefix_tokens)
    if as_text and tokenizer is None:
        raise ConfigError("Random prompts for chat are text and need --tokenizer: a folder or hub id.")
    requests = []
    for prompt, output_len in zip(prompts, trace.output_lens, strict=True):
        text = _text_of(prompt, tokenizer, ids, rng) if as_text and tokenizer is not None else None
        requests.append(BenchRequest(prompt if text is None else text, len(prompt), int(output_len)))
    return requests


def _text_of(
    prompt: list[int], tokenizer: TextTokenizer, ids: tuple[int, int], rng: np.random.Generator
) -> str:
    """Text that encodes to as many tokens as ``prompt`` has, or nearly.

    Random ids rarely survive decoding and encoding unchanged, so what is missing is added and what is too
    much is cut, a few times over.
    """
    wanted = len(prompt)
    for _ in range(8):
        text = tokenizer.decode(prompt)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        if len(prompt) == wanted:
            return text
        prompt = prompt[:wanted] + rng.integers(*ids, max(wanted - len(prompt), 0)).tolist()
    return text


def _conversation_requests(
    dataset: DatasetConfig, tokenizer: TextTokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    """A random sample of the conversations that pass vLLM's filter of lengths."""
    assert dataset.path is not None
    conversations = read_conversations(dataset.path)
    if tokenizer is None:
        raise ConfigError("--dataset-name sharegpt needs --tokenizer, a folder or hub id, to count tokens.")
    longest = dataset.max_total_tokens or _SHAREGPT_MAX_TOTAL_TOKENS
    requests: list[BenchRequest] = []
    for index in rng.permutation(len(conversations)):
        prompt, answer = conversations[index]
        input_len = len(tokenizer.encode(prompt))
        output_len = dataset.fixed_output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        is_long_enough = input_len >= _SHAREGPT_MIN_TOKENS and (
            dataset.fixed_output_len is not None or output_len >= _SHAREGPT_MIN_TOKENS
        )
        is_short_enough = input_len <= _SHAREGPT_MAX_INPUT_TOKENS and input_len + output_len <= longest
        if is_long_enough and is_short_enough:
            requests.append(BenchRequest(prompt, input_len, output_len))
        if len(requests) == dataset.num_prompts:
            return requests
    if not requests:
        raise ConfigError(f"{dataset.path}: no conversation has a length between the limits.")
    again = rng.integers(len(requests), size=dataset.num_prompts - len(requests))
    return requests + [requests[i] for i in again]
