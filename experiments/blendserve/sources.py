"""The kinds of requests that BlendServe's evaluation mixes (section 5.1, appendix A.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.core.errors import ConfigError
from backfill.workloads.lengths import LengthDistribution
from backfill.workloads.traces import read_trace

Ints = NDArray[np.int64]
# Longest output that is drawn; four times the mean of a video.
_MAX_OUTPUT = 65_536
_MAX_PROMPT = 32_768


class TraceFigures(NamedTuple):
    """Share of all tokens that a perfect prefix cache saves, and compute density with it."""

    sharing: float
    density: float


@dataclass(frozen=True, slots=True)
class SourceRequests:
    """Requests of one source, in the order in which they are drawn.

    Attributes:
        prefix_tokens: length of the prefixes.
        prefixes: which of the source's prefixes each prompt begins with.
        own_tokens: tokens of each prompt after its prefix; no two prompts have these in common.
        output_tokens: tokens of each output.
    """

    prefix_tokens: int
    prefixes: Ints
    own_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.own_tokens)

    @property
    def prompt_tokens(self) -> Ints:
        return self.own_tokens + self.prefix_tokens

    @property
    def shared_tokens(self) -> Ints:
        """Of each prompt: all of its prefix but in the first request that has it."""
        shared = np.full(len(self), self.prefix_tokens)
        shared[np.unique(self.prefixes, return_index=True)[1]] = 0
        return shared

    def first(self, count: int) -> SourceRequests:
        return self._select(np.arange(min(count, len(self))))

    def spread(self, count: int, rng: np.random.Generator) -> SourceRequests:
        """So many of them, in random order, whose output lengths are evenly spaced in the sorted ones."""
        ranks = ((np.arange(count) + 0.5) * len(self) / count).astype(np.int64)
        return self._select(rng.permutation(np.argsort(self.output_tokens, kind="stable")[ranks]))

    def _select(self, rows: Ints) -> SourceRequests:
        return SourceRequests(
            self.prefix_tokens, self.prefixes[rows], self.own_tokens[rows], self.output_tokens[rows]
        )


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of requests.

    Attributes:
        inputs: tokens of a prompt after its prefix.
        prefix_tokens: of the system prompt, or of the examples before a question. Whole KV blocks, since
            nothing less is shared.
        num_prefixes: different prefixes.
        knows_outputs: the output's length is known before it runs.
        paper: what the paper's table 3 has; None where the source is not the paper's.
    """

    inputs: LengthDistribution
    outputs: LengthDistribution
    prefix_tokens: int
    paper: TraceFigures | None = None
    num_prefixes: int = 1
    knows_outputs: bool = False

    def draw(self, count: int, rng: np.random.Generator) -> SourceRequests:
        inputs = np.minimum(self.inputs.sample(count, rng), _MAX_PROMPT)
        outputs = np.minimum(self.outputs.sample(count, rng), _MAX_OUTPUT)
        return self._with_prefixes(inputs, outputs, rng)

    def draw_from(self, path: Path, count: int, rng: np.random.Generator) -> SourceRequests:
        """Lengths of a file in random order, again where it has fewer; prefixes are added to its prompts.

        Raises: ConfigError when the file cannot be used.
        """
        trace = read_trace(path)
        fitting = np.flatnonzero((trace.input_lens <= _MAX_PROMPT) & (trace.output_lens <= _MAX_OUTPUT))
        if not len(fitting):
            raise ConfigError(f"{path}: no request has {_MAX_OUTPUT} tokens of output or less.")
        rows = np.resize(rng.permutation(fitting), count)
        return self._with_prefixes(trace.input_lens[rows], trace.output_lens[rows], rng)

    def _with_prefixes(self, inputs: Ints, outputs: Ints, rng: np.random.Generator) -> SourceRequests:
        prefixes = rng.integers(self.num_prefixes, size=len(inputs))
        return SourceRequests(self.prefix_tokens, prefixes, np.maximum(inputs, 1), np.maximum(outputs, 1))


def _lognormal(mean: int, cv: float) -> LengthDistribution:
    return LengthDistribution(mean, cv, "lognormal")


# Where lengths are chosen, they give the densities of table 3; docs/simulation.md compares all of them.
SOURCES: Mapping[str, Source] = {
    # Chosen: the trace has several logs with different lengths, and the paper does not say which it took.
    "burstgpt": Source(_lognormal(620, 0.8), _lognormal(44, 0.7), 16, TraceFigures(0.02, 17.78)),
    # As in the goodput sweep: Azure's code trace of 2023.
    "azure": Source(_lognormal(2048, 0.93), _lognormal(28, 1.9), 16, TraceFigures(0.01, 33.2)),
    # BROS, table 2.
    "sharegpt": Source(_lognormal(223, 1.15), _lognormal(235, 1.14), 16, TraceFigures(0.02, 3.12)),
    # Turns as WildChat's own paper has them (arXiv 2405.01470, table 1), prompts less heavy in the tail;
    # outputs with the mean of 256 to which BlendServe scales them. Prompts that repeat are a prefix here.
    "wildchat": Source(_lognormal(296, 1.5), _lognormal(256, 0.93), 128, TraceFigures(0.19, 2.13)),
    # 57 subjects with five examples each, and answers of two tokens.
    "mmlu": Source(
        _lognormal(98, 0.7), LengthDistribution(2), 608, TraceFigures(0.86, 54.91), num_prefixes=57
    ),
    # A caption; outputs have a mean of 16K after the longest are cut.
    "openvid": Source(
        _lognormal(100, 0.3), _lognormal(17_200, 1.1), 16, TraceFigures(0.0, 0.05), knows_outputs=True
    ),
    # Chosen: answers with long reasoning. They last a minute or two, where a video lasts ten.
    "reasoning": Source(_lognormal(150, 0.5), _lognormal(2500, 0.6), 64, knows_outputs=True),
}
ComputeSource = Literal["burstgpt", "azure", "sharegpt", "wildchat"]
"""Sources that are mixed with videos and MMLU, one at a time."""
