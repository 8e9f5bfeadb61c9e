"""Synthetic prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backfill.core.errors import ConfigError
from backfill.workloads.lengths import Lengths

# In most vocabularies lower ids are special tokens and single bytes. The upper bound keeps to common words.
_LOWEST_ID = 1000
_HIGHEST_ID = 40_000
# Llama's. Nearly every model's vocabulary is at least as large.
ASSUMED_VOCABULARY = 32_000


def id_range(vocabulary_size: int) -> tuple[int, int]:
    """Half-open range of ids to draw from: [1000, 40000), cut at the end of the vocabulary.

    For a vocabulary of fewer than 2000 entries it is the upper half.
    """
    if vocabulary_size < 2:
        raise ConfigError(f"The vocabulary must have at least 2 entries, got {vocabulary_size}.")
    end = min(_HIGHEST_ID, vocabulary_size)
    return min(_LOWEST_ID, end // 2), end


def random_prompts(
    lengths: Lengths, ids: tuple[int, int], rng: np.random.Generator, *, prefix_tokens: int = 0
) -> list[list[int]]:
    """Prompts of random ids. All begin with the same random prefix.

    Args:
        lengths: tokens of each prompt after the prefix.
        ids: half-open range to draw from.
        prefix_tokens: length of the prefix, at least 0.
    """
    prefix: list[int] = rng.integers(*ids, prefix_tokens).tolist()
    return [prefix + rng.integers(*ids, int(length)).tolist() for length in lengths]


def prefix_sharing_prompts(
    lengths: Lengths, hash_ids: Sequence[Sequence[int]], block_tokens: int, ids: tuple[int, int], seed: int
) -> list[list[int]]:
    """Prompts that share prefixes where a trace's prompts do.

    A block's tokens depend only on its hash id and ``seed``, so equal leading ids give equal leading tokens.
    A prompt longer than its blocks ends in tokens of its own.

    Args:
        lengths: tokens of each prompt.
        hash_ids: each prompt's ids of its blocks.
        block_tokens: tokens of a block.
        ids: half-open range to draw from.
    """
    blocks: dict[tuple[int, int], list[int]] = {}
    prompts = []
    for index, (length, hashes) in enumerate(zip(lengths, hash_ids, strict=True)):
        tokens: list[int] = []
        for block_id in hashes:
            if len(tokens) >= length:
                break
            tokens += _block(blocks, (0, block_id), block_tokens, ids, seed)
        missing = int(length) - len(tokens)
        if missing > 0:
            tokens += _block({}, (1, index), missing, ids, seed)
        prompts.append(tokens[: int(length)])
    return prompts


def _block(
    known: dict[tuple[int, int], list[int]], key: tuple[int, int], size: int, ids: tuple[int, int], seed: int
) -> list[int]:
    if key not in known:
        known[key] = np.random.default_rng((seed, *key)).integers(*ids, size).tolist()
    return known[key]
