"""Prompts that begin alike: a few long prefixes, each with many suffixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backfill.bench.prompt_text import TextTokenizer, text_of
from backfill.bench.record import BenchRequest
from backfill.core.config import at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.workloads.prompts import random_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRepetitionConfig:
    """The dataset of this name of ``vllm bench serve``, with its defaults.

    Attributes:
        prefix_repetition_prefix_len: tokens of each prefix.
        prefix_repetition_suffix_len: tokens after the prefix, each prompt's own.
        prefix_repetition_num_prefixes: prefixes; each begins an equal share of the prompts.
        prefix_repetition_output_len: output tokens of every request.
    """

    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        at_least("prefix_repetition_prefix_len", self.prefix_repetition_prefix_len, 0)
        at_least("prefix_repetition_suffix_len", self.prefix_repetition_suffix_len, 0)
        at_least("prefix_repetition_num_prefixes", self.prefix_repetition_num_prefixes, 1)
        at_least("prefix_repetition_output_len", self.prefix_repetition_output_len, 1)
        if self.prefix_repetition_prefix_len + self.prefix_repetition_suffix_len == 0:
            raise ConfigError(
                "`prefix_repetition_prefix_len` and `prefix_repetition_suffix_len` must not both be 0."
            )

    def check_count(self, num_prompts: int) -> None:
        """Raises: ConfigError when a prefix would be without a prompt."""
        if num_prompts < self.prefix_repetition_num_prefixes:
            raise ConfigError(
                f"`num_prompts` must be at least `prefix_repetition_num_prefixes` "
                f"{self.prefix_repetition_num_prefixes}, got {num_prompts}."
            )

    def requests(
        self,
        count: int,
        ids: tuple[int, int],
        rng: np.random.Generator,
        tokenizer: TextTokenizer | None = None,
    ) -> list[BenchRequest]:
        """``count`` requests in random order. Unlike vLLM, a remainder is sent too.

        Args:
            ids: half-open range of token ids to draw from.
            tokenizer: prompts are text; token ids without it.
        """
        num_prefixes = self.prefix_repetition_num_prefixes
        prefixes = random_prompts(np.full(num_prefixes, self.prefix_repetition_prefix_len), ids, rng)
        suffixes = random_prompts(np.full(count, self.prefix_repetition_suffix_len), ids, rng)
        leads = [] if tokenizer is None else [text_of(prefix, tokenizer, ids, rng) for prefix in prefixes]
        prefix_len = self.prefix_repetition_prefix_len
        input_len = prefix_len + self.prefix_repetition_suffix_len
        seen: set[int] = set()
        requests = []
        for number, suffix in zip(rng.permutation(np.arange(count) % num_prefixes), suffixes, strict=True):
            requests.append(
                BenchRequest(
                    prefixes[number] + suffix
                    if tokenizer is None
                    else text_of(suffix, tokenizer, ids, rng, lead=leads[number]),
                    input_len,
                    self.prefix_repetition_output_len,
                    shared_tokens=prefix_len if int(number) in seen else 0,
                )
            )
            seen.add(int(number))
        return requests
