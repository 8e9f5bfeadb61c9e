"""Lengths of requests: drawn from distributions, or sampled from a published file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from backfill.core.errors import ConfigError
from backfill.simulation.replay import Lengths
from backfill.workloads.lengths import LengthDistribution
from backfill.workloads.traces import Trace, read_trace


class LengthSource(Protocol):
    def sample(self, count: int, max_len: int, rng: np.random.Generator) -> tuple[Lengths, ...]:
        """Lengths of ``count`` requests, of at most ``max_len`` tokens each. Raises: ConfigError."""


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Prompts and outputs drawn independently.

    An output is cut at half of the context and a prompt at what the output leaves.
    """

    prompt: LengthDistribution
    output: LengthDistribution

    def sample(self, count: int, max_len: int, rng: np.random.Generator) -> tuple[Lengths, ...]:
        prompts = self.prompt.sample(count, rng)
        outputs = np.minimum(self.output.sample(count, rng), max_len // 2)
        prompts = np.minimum(prompts, max_len - outputs)
        return _lengths(prompts, outputs)


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Requests of a file, in random order. They repeat where the file has fewer than are asked for."""

    path: Path
    trace: Trace

    @classmethod
    def read(cls, path: Path) -> TraceLengths:
        """Raises: ConfigError when the file cannot be used."""
        return cls(path, read_trace(path))

    def sample(self, count: int, max_len: int, rng: np.random.Generator) -> tuple[Lengths, ...]:
        """Raises: ConfigError if no request fits ``max_len``."""
        fitting = np.flatnonzero(self.trace.input_lens + self.trace.output_lens <= max_len)
        if not len(fitting):
            raise ConfigError(f"{self.path} has no request of at most {max_len} tokens.")
        rows = np.resize(rng.permutation(fitting), count)
        return _lengths(self.trace.input_lens[rows], self.trace.output_lens[rows])


def _lengths(prompts: np.ndarray, outputs: np.ndarray) -> tuple[Lengths, ...]:
    return tuple(Lengths(int(i), int(o)) for i, o in zip(prompts, outputs, strict=True))


# BROS, table 2: means and standard deviations; offline lengths are uniform (section 7.1).
SHAREGPT = DrawnLengths(
    LengthDistribution(223, 256.36 / 222.76, "lognormal"),
    LengthDistribution(235, 268.50 / 234.51, "lognormal"),
)
LMSYS = DrawnLengths(
    LengthDistribution(91, 148.52 / 90.50, "lognormal"),
    LengthDistribution(237, 228.21 / 237.04, "lognormal"),
)
BROS_OFFLINE = DrawnLengths(LengthDistribution(768, 1 / 3), LengthDistribution(80, 0.6))
# Azure's code trace of 2023 has means of about 2,048 and 28 tokens. The variation is that of lognormal
# lengths with the medians that Splitwise (ISCA 2024, section III) reports for it: 1,500 and 13.
CODE = DrawnLengths(LengthDistribution(2048, 0.93, "lognormal"), LengthDistribution(28, 1.9, "lognormal"))
# Chosen, not measured: a question about a document of three quarters of a context of 4,096 tokens.
DOCUMENT = DrawnLengths(LengthDistribution(3000, 0.2, "normal"), LengthDistribution(100, 0.5, "lognormal"))
