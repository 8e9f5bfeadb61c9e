"""Mixes sources to a compute density and a share of shared tokens (BlendServe, appendix A.1)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.blending.requests import PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.core.errors import ConfigError
from experiments.blendserve.sources import SOURCES, SourceRequests, TraceFigures

# Llama-3.1-8B on an A100-80G at its peaks, with which the paper states densities (section 2.3).
A100_LLAMA_3_8B = ResourceModel.from_dimensions(
    parameters=8.03e9,
    hidden_size=4096,
    kv_size=1024,
    num_layers=32,
    flops_per_s=312e12,
    bytes_per_s=2.039e12,
    dtype_bytes=2,
)
VOCAB_SIZE = 32_000
_VIDEO, _SHARED = "openvid", "mmlu"
# Counts that solve for the means of some requests change those means; they settle within a few rounds.
_ROUNDS = 8

Floats = NDArray[np.float64]


class MixSpec(NamedTuple):
    """A pool to draw.

    Attributes:
        source: of the compute-bound requests, to which videos and MMLU are added.
        density: of the whole pool, with a perfect prefix cache.
        sharing: share of all tokens, prompts and outputs, that a perfect prefix cache saves.
        lengths: file of the source's lengths; None draws them.
        long: source of the memory-bound requests, the videos unless it says otherwise.
    """

    source: str
    density: float
    sharing: float
    num_requests: int
    seed: int
    lengths: Path | None = None
    long: str = _VIDEO


class Usage(NamedTuple):
    """Totals of some requests: tokens, those that a perfect cache saves, and seconds of either resource."""

    tokens: float
    shared_tokens: float
    compute_s: float
    memory_s: float

    @classmethod
    def of(cls, requests: SourceRequests) -> Usage:
        prompts = requests.prompt_tokens.astype(np.float64)
        outputs = requests.output_tokens.astype(np.float64)
        shared = requests.shared_tokens.astype(np.float64)
        resources = A100_LLAMA_3_8B
        compute_s = resources.prefill_s(shared, prompts) + resources.token_s * outputs
        memory_s = resources.expected_memory_s(prompts, outputs, outputs * outputs)
        return cls(
            float((prompts + outputs).sum()),
            float(shared.sum()),
            float(compute_s.sum()),
            float(memory_s.sum()),
        )

    @classmethod
    def sum(cls, usages: list[Usage]) -> Usage:
        return cls(*map(sum, zip(*usages, strict=True)))

    @property
    def figures(self) -> TraceFigures:
        return TraceFigures(self.shared_tokens / self.tokens, self.compute_s / self.memory_s)


@dataclass(frozen=True, slots=True)
class Mix:
    """A pool of requests, source by source.

    Attributes:
        parts: requests of each source.
        figures: sharing and density of the whole pool.
    """

    spec: MixSpec
    parts: Mapping[str, SourceRequests]
    figures: TraceFigures

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def requests(self) -> tuple[list[PoolRequest], list[int]]:
        """The requests, numbered, and their true output lengths.

        They come source after source, as batches do; within a source in random order. Prompts are token ids:
        those of one prefix begin alike, and nothing else is shared.
        """
        rng = np.random.default_rng([self.spec.seed, 1])
        requests: list[PoolRequest] = []
        for name, part in self.parts.items():
            knows_outputs, most = SOURCES[name].knows_outputs, int(part.output_tokens.max())
            for token_ids, output in zip(
                _prompts(part, SOURCES[name].num_prefixes, rng), part.output_tokens.tolist(), strict=True
            ):
                known = output if knows_outputs else None
                requests.append(PoolRequest(len(requests), token_ids, known or most, known))
        return requests, [output for part in self.parts.values() for output in part.output_tokens.tolist()]


def _prompts(part: SourceRequests, num_prefixes: int, rng: np.random.Generator) -> Iterator[array[int]]:
    """Token ids: a prefix, and what the prompt has of its own."""
    prefixes = rng.integers(VOCAB_SIZE, size=(num_prefixes, part.prefix_tokens), dtype=np.uint32)
    own = rng.integers(VOCAB_SIZE, size=int(part.own_tokens.sum()), dtype=np.uint32)
    begins = 0
    for prefix, length in zip(part.prefixes, part.own_tokens, strict=True):
        token_ids = array("I", prefixes[prefix].tobytes())
        token_ids.frombytes(own[begins : begins + length].tobytes())
        begins += length
        yield token_ids


def draw_mix(spec: MixSpec) -> Mix:
    """Draw each source, and take as many of each as the targets need.

    The targets are two linear equations in the numbers of requests, whose sum is the third. There are few
    videos, so their lengths are spread evenly over the distribution, and their number is found first, from
    the mean of many. The numbers of the others follow, and the sum is near ``num_requests``. A source
    that shares more than the target by itself is mixed with no MMLU; the mix's figures say what it has.

    Raises: ConfigError for a density that no mix with videos has, or too few requests for one.
    """
    rng = np.random.default_rng([spec.seed, 0])
    source, count = SOURCES[spec.source], 2 * spec.num_requests
    own = source.draw(count, rng) if spec.lengths is None else source.draw_from(spec.lengths, count, rng)
    videos, shared = SOURCES[spec.long].draw(count, rng), SOURCES[_SHARED].draw(count, rng)
    means = [np.array(Usage.of(each)) / count for each in (own, videos, shared)]
    num_videos = round(_three_counts(spec, *means)[1])
    if num_videos < 1:
        raise ConfigError(
            f"{spec.num_requests} requests of {spec.source} make no mix of density {spec.density:g} and "
            f"sharing {spec.sharing:g}: they need a video at least, so more requests or other targets."
        )
    videos = videos.spread(num_videos, rng)
    of_videos = np.array(Usage.of(videos))
    for _ in range(_ROUNDS):
        num_own, num_shared = _two_counts(spec, means[0], means[2], of_videos)
        for place, drawn, number in ((0, own, num_own), (2, shared, num_shared)):
            if taken := min(round(number), count):
                means[place] = np.array(Usage.of(drawn.first(taken))) / taken
    parts = {
        spec.source: own.first(round(num_own)),
        _SHARED: shared.first(round(num_shared)),
        spec.long: videos,
    }
    present = {name: part for name, part in parts.items() if len(part)}
    if spec.source not in present:
        raise ConfigError(
            f"No mix of {spec.source}, MMLU and videos has a density of {spec.density:g} and shares "
            f"{spec.sharing:g} of its tokens."
        )
    return Mix(spec, present, Usage.sum([Usage.of(part) for part in present.values()]).figures)


def _three_counts(spec: MixSpec, *means: Floats) -> Floats:
    """Numbers of requests, from the mean usage of one request of the source, of videos and of MMLU."""
    excesses = np.array([_excess(spec, mean) for mean in means]).T
    counts = np.linalg.solve(np.vstack([excesses, np.ones(3)]), np.array([0.0, 0.0, spec.num_requests]))
    if counts[2] < 0.0:
        two = np.linalg.solve(np.vstack([excesses[0, :2], np.ones(2)]), np.array([0.0, spec.num_requests]))
        counts = np.append(two, 0.0)
    return np.asarray(counts)


def _two_counts(spec: MixSpec, own: Floats, shared: Floats, of_videos: Floats) -> tuple[float, float]:
    """Numbers of requests of the source and of MMLU beside these videos, from means of one request."""
    of_own, of_shared, of_all_videos = (_excess(spec, each) for each in (own, shared, of_videos))
    num_own, num_shared = np.linalg.solve(np.array([of_own, of_shared]).T, -of_all_videos).tolist()
    if num_shared < 0.0:
        num_own, num_shared = float(-of_all_videos[0] / of_own[0]), 0.0
    return max(num_own, 0.0), num_shared


def _excess(spec: MixSpec, usage: Floats) -> Floats:
    """By how much compute and shared tokens exceed the targets; 0 for both in the whole mix."""
    tokens, shared, compute_s, memory_s = usage
    return np.array([compute_s - spec.density * memory_s, shared - spec.sharing * tokens])
