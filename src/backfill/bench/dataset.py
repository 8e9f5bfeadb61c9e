"""Builds the requests of a run from a dataset, and gives each its arrival time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from backfill.bench.arrivals import ArrivalConfig
from backfill.bench.multi_turn import Conversation, MultiTurnConfig
from backfill.bench.prefix_repetition import PrefixRepetitionConfig
from backfill.bench.prompt_text import TextTokenizer, text_of
from backfill.bench.record import BenchRequest
from backfill.core.config import at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.workloads.lengths import LengthDistribution, LengthLaw
from backfill.workloads.prompts import ASSUMED_VOCABULARY, id_range, prefix_sharing_prompts, random_prompts
from backfill.workloads.traces import Trace, read_conversations, read_trace

# The filter of vLLM's benchmark.
_SHAREGPT_MIN_TOKENS = 4
_SHAREGPT_MAX_INPUT_TOKENS = 1024
_SHAREGPT_MAX_TOTAL_TOKENS = 2048
# Where a file of each dataset is published (docs/benchmarking.md).
_PUBLISHED = {
    "trace": "https://github.com/microsoft/vidur/blob/main/data/processed_traces/splitwise_conv.csv",
    "sharegpt": "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
}
_PREFIX_REPETITION, _MULTI_TURN = PrefixRepetitionConfig(), MultiTurnConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """The prompts and their lengths in tokens.

    Attributes:
        dataset_name: random token ids, ShareGPT (JSON, or a CSV of lengths), a trace (CSV or JSONL), random
            prompts of a few prefixes, or conversations of several turns.
        dataset_path: file of sharegpt and trace.
        num_prompts: requests to send; with multi_turn, conversations.
        input_len: the same as `random_input_len`.
        output_len: output tokens of every request, with any dataset.
        random_input_len: mean length of a random prompt.
        random_output_len: mean output length with random prompts.
        random_range_ratio: random lengths lie within mean * (1 ± ratio), uniformly.
        random_length_law: distribution of random lengths; normal and lognormal need `random_length_cv`.
        random_length_cv: coefficient of variation of random lengths.
        random_prefix_len: tokens in front of every random prompt, the same for all.
        max_total_len: leave out a dataset's requests of more tokens, output included.
        trace_seconds_per_unit: unit of the times in a JSONL trace; Mooncake's is the millisecond.
        trace_hash_block_tokens: prompt tokens of one of a JSONL trace's hash_ids.
        tokenizer: folder, known name or hub id; that of the server's model by default.
        seed: seed of lengths, prompts and arrivals. Runs of one seed send the same prompts, which a server
            may still have in its prefix cache.
        prefix_repetition, multi_turn: options of the datasets of these names.
    """

    dataset_name: Literal["random", "sharegpt", "trace", "prefix_repetition", "multi_turn"] = "random"
    dataset_path: Path | None = None
    num_prompts: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_length_law: LengthLaw = "uniform"
    random_length_cv: float | None = None
    random_prefix_len: int = 0
    max_total_len: int | None = None
    trace_seconds_per_unit: float = 0.001
    trace_hash_block_tokens: int = 512
    tokenizer: str | None = None
    seed: int = 0
    prefix_repetition: PrefixRepetitionConfig = _PREFIX_REPETITION
    multi_turn: MultiTurnConfig = _MULTI_TURN

    def validate(self) -> None:
        """Raises: ConfigError, also for a dataset that is missing."""
        check_types(self)
        at_least("num_prompts", self.num_prompts, 1)
        at_least("random_prefix_len", self.random_prefix_len, 0)
        at_least("trace_hash_block_tokens", self.trace_hash_block_tokens, 1)
        if not self.trace_seconds_per_unit > 0:
            raise ConfigError(
                f"`trace_seconds_per_unit` must be above 0, got {self.trace_seconds_per_unit:g}."
            )
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"`seed` must be at least 0 and below 2**32, got {self.seed}.")
        if (self.random_length_cv is not None) == (self.random_length_law == "uniform"):
            raise ConfigError(
                "`random_length_cv` goes with `random_length_law` normal or lognormal, and only then."
            )
        self.input_lengths.validate("random_input_len" if self.input_len is None else "input_len")
        self.output_lengths.validate("random_output_len" if self.output_len is None else "output_len")
        self.prefix_repetition.validate()
        self.multi_turn.validate()
        if self.dataset_name == "prefix_repetition":
            self.prefix_repetition.check_count(self.num_prompts)
        self._check_file()
        self._check_lengths()

    @property
    def input_lengths(self) -> LengthDistribution:
        """Of random prompts."""
        return self._lengths(self.random_input_len if self.input_len is None else self.input_len)

    @property
    def output_lengths(self) -> LengthDistribution:
        """Of the outputs of random prompts."""
        return self._lengths(self.random_output_len if self.output_len is None else self.output_len)

    def _lengths(self, mean: int) -> LengthDistribution:
        cv = self.random_length_cv
        return LengthDistribution(mean, self.random_range_ratio if cv is None else cv, self.random_length_law)

    def workload_settings(self) -> dict[str, object]:
        """The options of a dataset that has a group of its own, as the result keeps them."""
        if self.dataset_name == "prefix_repetition":
            return dataclasses.asdict(self.prefix_repetition_config)
        return dataclasses.asdict(self.multi_turn_config) if self.dataset_name == "multi_turn" else {}

    @property
    def prefix_repetition_config(self) -> PrefixRepetitionConfig:
        """With `output_len`, if it is given."""
        length = self.output_len or self.prefix_repetition.prefix_repetition_output_len
        return dataclasses.replace(self.prefix_repetition, prefix_repetition_output_len=length)

    @property
    def multi_turn_config(self) -> MultiTurnConfig:
        """With `output_len`, if it is given."""
        length = self.output_len or self.multi_turn.multi_turn_output_len
        return dataclasses.replace(self.multi_turn, multi_turn_output_len=length)

    def _check_lengths(self) -> None:
        if self.dataset_name not in ("prefix_repetition", "multi_turn"):
            return
        for field in ("input_len", "max_total_len"):
            if getattr(self, field) is not None:
                raise ConfigError(
                    f"`{field}` does not go with `dataset_name` {self.dataset_name}, whose lengths have "
                    "options of their own."
                )

    def _check_file(self) -> None:
        if self.dataset_name not in _PUBLISHED:
            return
        if self.dataset_path is None:
            raise ConfigError(f"`dataset_name` {self.dataset_name} needs `dataset_path`.")
        if not self.dataset_path.exists():
            raise ConfigError(
                f"`dataset_path` {self.dataset_path} cannot be read: there is no such file. "
                f"One is {_PUBLISHED[self.dataset_name]}."
            )


def build_load(
    dataset: DatasetConfig,
    arrival: ArrivalConfig,
    *,
    tokenizer: TextTokenizer | None = None,
    vocabulary_size: int | None = None,
    as_text: bool = False,
) -> list[BenchRequest] | list[Conversation]:
    """The requests or conversations of a run, in order of arrival; the same for equal arguments.

    Args and errors: as for ``build_requests``. Conversations are text and always need the tokenizer.
    """
    if dataset.dataset_name != "multi_turn":
        return build_requests(
            dataset, arrival, tokenizer=tokenizer, vocabulary_size=vocabulary_size, as_text=as_text
        )
    dataset.validate()
    arrival.validate()
    if tokenizer is None:
        raise ConfigError("`dataset_name` multi_turn needs `tokenizer`, a folder or hub id, to make text.")
    conversations = dataset.multi_turn_config.conversations(
        dataset.num_prompts,
        tokenizer,
        id_range(vocabulary_size or ASSUMED_VOCABULARY),
        np.random.SeedSequence(dataset.seed),
    )
    due = arrival.instants(len(conversations), None, np.random.RandomState(dataset.seed))
    return [each.due_at(float(at)) for each, at in zip(conversations, due, strict=True)]


def build_requests(
    dataset: DatasetConfig,
    arrival: ArrivalConfig,
    *,
    tokenizer: TextTokenizer | None = None,
    vocabulary_size: int | None = None,
    as_text: bool = False,
) -> list[BenchRequest]:
    """The requests of any dataset but multi_turn, in order of arrival; the same for equal arguments.

    Lengths, prompts and arrivals each have a random generator, so a change of one leaves the others alone.

    Args:
        vocabulary_size: upper bound of random ids; Llama's if None.
        as_text: prompts are text, as chat needs. Random prompts then need the tokenizer.
    Raises: ConfigError for settings out of range, a dataset that cannot be read, or a missing tokenizer.
    """
    dataset.validate()
    arrival.validate()
    of_lengths, of_prompts = np.random.default_rng(dataset.seed).spawn(2)
    # `vllm bench serve` draws from numpy's older generator too, so equal seeds give equal arrivals.
    of_arrivals = np.random.RandomState(dataset.seed)
    recorded = None
    if dataset.dataset_name == "sharegpt" and not str(dataset.dataset_path).endswith(".csv"):
        requests = _conversation_requests(dataset, tokenizer, of_lengths)
    elif dataset.dataset_name == "prefix_repetition":
        requests = _prefix_requests(dataset, tokenizer, vocabulary_size, as_text, of_prompts)
    else:
        trace = _trace(dataset, of_lengths)
        recorded = trace.arrivals_at_s
        requests = _synthetic_requests(dataset, trace, tokenizer, vocabulary_size, as_text, of_prompts)
    due = arrival.instants(len(requests), recorded, of_arrivals)
    return [
        dataclasses.replace(request, due_at_s=float(at)) for request, at in zip(requests, due, strict=True)
    ]


def _trace(dataset: DatasetConfig, rng: np.random.Generator) -> Trace:
    """Lengths of the requests: drawn, or from a file.

    A file with times gives its first requests, a file without them a random sample.
    """
    count = dataset.num_prompts
    if dataset.dataset_name == "random":
        return Trace(dataset.input_lengths.sample(count, rng), dataset.output_lengths.sample(count, rng))
    assert dataset.dataset_path is not None
    trace = read_trace(dataset.dataset_path, seconds_per_unit=dataset.trace_seconds_per_unit)
    if dataset.output_len is not None:
        output = np.full(len(trace), dataset.output_len, dtype=np.int64)
        trace = dataclasses.replace(trace, output_lens=output)
    if dataset.max_total_len is not None:
        fits = trace.input_lens + trace.output_lens <= dataset.max_total_len
        if not fits.any():
            raise ConfigError(
                f"{dataset.dataset_path}: no request of at most `max_total_len` {dataset.max_total_len} "
                "tokens."
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
            trace.input_lens, trace.hash_ids, dataset.trace_hash_block_tokens, ids, dataset.seed
        )
    else:
        prompts = random_prompts(trace.input_lens, ids, rng, prefix_tokens=dataset.random_prefix_len)
    writer = _text_writer(tokenizer, as_text)
    requests = []
    for index, (prompt, output_len) in enumerate(zip(prompts, trace.output_lens, strict=True)):
        shared = dataset.random_prefix_len if index else 0
        requests.append(
            BenchRequest(
                prompt if writer is None else text_of(prompt, writer, ids, rng),
                len(prompt),
                int(output_len),
                shared_tokens=shared if trace.hash_ids is None else None,
            )
        )
    return requests


def _prefix_requests(
    dataset: DatasetConfig,
    tokenizer: TextTokenizer | None,
    vocabulary_size: int | None,
    as_text: bool,
    rng: np.random.Generator,
) -> list[BenchRequest]:
    ids = id_range(vocabulary_size or ASSUMED_VOCABULARY)
    return dataset.prefix_repetition_config.requests(
        dataset.num_prompts, ids, rng, _text_writer(tokenizer, as_text)
    )


def _text_writer(tokenizer: TextTokenizer | None, as_text: bool) -> TextTokenizer | None:
    """None where prompts are sent as token ids. Raises: ConfigError where text needs a missing tokenizer."""
    if as_text and tokenizer is None:
        raise ConfigError("Random prompts for chat are text and need `tokenizer`: a folder or hub id.")
    return tokenizer if as_text else None


def _conversation_requests(
    dataset: DatasetConfig, tokenizer: TextTokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    """A random sample of the conversations whose lengths pass vLLM's filter."""
    assert dataset.dataset_path is not None
    conversations = read_conversations(dataset.dataset_path)
    if tokenizer is None:
        raise ConfigError("`dataset_name` sharegpt needs `tokenizer`, a folder or hub id, to count tokens.")
    longest = dataset.max_total_len or _SHAREGPT_MAX_TOTAL_TOKENS
    requests: list[BenchRequest] = []
    for index in rng.permutation(len(conversations)):
        prompt, answer = conversations[index]
        input_len = len(tokenizer.encode(prompt))
        output_len = dataset.output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        is_long_enough = input_len >= _SHAREGPT_MIN_TOKENS and (
            dataset.output_len is not None or output_len >= _SHAREGPT_MIN_TOKENS
        )
        is_short_enough = input_len <= _SHAREGPT_MAX_INPUT_TOKENS and input_len + output_len <= longest
        if is_long_enough and is_short_enough:
            requests.append(BenchRequest(prompt, input_len, output_len, shared_tokens=None))
        if len(requests) == dataset.num_prompts:
            return requests
    if not requests:
        raise ConfigError(f"{dataset.dataset_path}: no conversation has a length between the limits.")
    repeated = rng.integers(len(requests), size=dataset.num_prompts - len(requests))
    return requests + [requests[i] for i in repeated]
