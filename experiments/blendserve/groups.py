"""Offline pools in which the first tokens of a prompt say how long answers are in the mean, and no more."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.blending.requests import PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.core.errors import ConfigError
from backfill.simulation.workloads import SHAREGPT, DrawnLengths, LengthSource, TraceLengths
from experiments.blendserve.mix import VOCAB_SIZE
from experiments.blendserve.sources import SourceRequests
from experiments.bros.tradeoff import LMSYS

LENGTHS: Mapping[str, DrawnLengths] = {"sharegpt": SHAREGPT, "lmsys": LMSYS}
MAX_OUTPUT = 8192
_MAX_LEN = 16_384
_PREFIX_TOKENS = 128
# Chosen: groups whose mean answers are spread geometrically over a factor of 16, of two kinds: chats, and
# tasks with answers twelve times as long.
_NUM_GROUPS = 20
_GROUP_SPREAD = 4.0
_LONG_FACTOR = 12.0

Floats = NDArray[np.float64]


class GroupSpec(NamedTuple):
    """A pool to draw.

    Attributes:
        lengths: of prompts and outputs, a name of ``LENGTHS``.
        density: of the whole pool; groups of long answers are added to chats until it is reached.
        path: file of the lengths instead; None draws them.
    """

    lengths: str
    density: float
    num_requests: int
    seed: int
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class GroupedPool:
    """Requests in random order.

    Attributes:
        parts: chats, and requests of the groups of long answers.
        requests: without a known output length; their ids are the indices of ``outputs``.
        outputs: true output lengths.
        compute_s, memory_s: of each request by its true length; a prefix is charged in equal parts.
    """

    parts: tuple[SourceRequests, SourceRequests]
    requests: list[PoolRequest]
    outputs: list[int]
    compute_s: Floats
    memory_s: Floats


def draw_groups(spec: GroupSpec, resources: ResourceModel) -> GroupedPool:
    """Raises: ConfigError for a file that cannot be used, or a density that no mix has."""
    rng = np.random.default_rng([spec.seed, 0])
    source: LengthSource = LENGTHS[spec.lengths] if spec.path is None else TraceLengths.read(spec.path)
    chats, long = (_draw(source, spec.num_requests, factor, rng) for factor in (1.0, _LONG_FACTOR))
    excesses = [_mean_excess(part, spec.density, resources) for part in (chats, long)]
    if not excesses[1] < 0.0 < excesses[0]:
        raise ConfigError(f"No mix of these lengths has a density of {spec.density:g}.")
    num_long = round(spec.num_requests * excesses[0] / (excesses[0] - excesses[1]))
    parts = chats.first(spec.num_requests - num_long), long.first(num_long)
    if not all(map(len, parts)):
        raise ConfigError(f"{spec.num_requests} requests are too few for a density of {spec.density:g}.")
    costs = [_costs(part, resources) for part in parts]
    prompts = [prompt for part in parts for prompt in _prompts(part, rng)]
    outputs = np.concatenate([part.output_tokens for part in parts])
    order = rng.permutation(len(outputs))
    return GroupedPool(
        parts,
        [PoolRequest(number, prompts[index], MAX_OUTPUT) for number, index in enumerate(order)],
        outputs[order].tolist(),
        np.concatenate([compute_s for compute_s, _ in costs])[order],
        np.concatenate([memory_s for _, memory_s in costs])[order],
    )


def _draw(source: LengthSource, count: int, factor: float, rng: np.random.Generator) -> SourceRequests:
    """Requests of groups whose mean outputs are around ``factor`` times those of the source."""
    drawn = np.array(source.sample(count, _MAX_LEN, rng))
    groups = rng.integers(_NUM_GROUPS, size=count)
    means = factor * np.geomspace(1.0 / _GROUP_SPREAD, _GROUP_SPREAD, _NUM_GROUPS)
    outputs = np.clip(np.rint(drawn[:, 1] * means[groups]), 1, MAX_OUTPUT).astype(np.int64)
    return SourceRequests(_PREFIX_TOKENS, groups, np.maximum(drawn[:, 0], 1), outputs)


def _costs(part: SourceRequests, resources: ResourceModel) -> tuple[Floats, Floats]:
    """Seconds of compute and memory of each request."""
    prompts, outputs = part.prompt_tokens.astype(np.float64), part.output_tokens.astype(np.float64)
    prefix = np.full(len(part), float(part.prefix_tokens))
    sharing = np.bincount(part.prefixes)[part.prefixes]
    compute_s = resources.prefill_s(prefix, prompts) + resources.token_s * outputs
    compute_s += resources.prefill_s(np.zeros(len(part)), prefix) / sharing
    return compute_s, resources.expected_memory_s(prompts, outputs, outputs * outputs)


def _mean_excess(part: SourceRequests, density: float, resources: ResourceModel) -> float:
    """Compute of a mean request that its memory traffic does not need at this density."""
    compute_s, memory_s = _costs(part, resources)
    return float((compute_s - density * memory_s).mean())


def _prompts(part: SourceRequests, rng: np.random.Generator) -> list[array[int]]:
    """Token ids: a prefix that the group has in common, and random ones."""
    prefixes = rng.integers(VOCAB_SIZE, size=(_NUM_GROUPS, part.prefix_tokens), dtype=np.uint32)
    found = []
    for group, num_own in zip(part.prefixes.tolist(), part.own_tokens.tolist(), strict=True):
        own = rng.integers(VOCAB_SIZE, size=num_own, dtype=np.uint32)
        found.append(array("I", prefixes[group].tobytes() + own.tobytes()))
    return found
