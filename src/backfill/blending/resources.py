"""Compute and memory time of requests, and the density that offline work should have.

Source: BlendServe (sections 2.3 and 2.4). docs/blending.md derives the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from backfill.core.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)

LEAST_OFFLINE_FRAC = 0.05
"""Share of the device that offline work is taken to have at least, whatever online traffic uses."""


@dataclass(frozen=True, slots=True)
class ResourceModel:
    """What a request costs, apart by resource. Linear, so that a measured cost model can be expressed in it.

    Attributes:
        token_s: seconds of compute per token, in matrix products.
        prompt_pair_s: seconds of compute per (query, key) pair of prompt attention. It is causal: a prompt of
            p tokens has p (p + 1) / 2 pairs.
        cached_token_s: seconds of memory traffic per cached token that a decode step reads.

    Raises: ConfigError for a negative or infinite value, or if a token or a read costs nothing.
    """

    token_s: float
    prompt_pair_s: float
    cached_token_s: float

    def __post_init__(self) -> None:
        for name in ("token_s", "prompt_pair_s", "cached_token_s"):
            value = getattr(self, name)
            least = "at least 0" if name == "prompt_pair_s" else "more than 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "prompt_pair_s"):
                raise ConfigError(f"must be finite and {least}, got {value}", field=name)

    @staticmethod
    def from_dimensions(
        parameters: float,
        hidden_size: int,
        kv_size: int,
        num_layers: int,
        flops_per_s: float,
        bytes_per_s: float,
        dtype_bytes: float = 2,
    ) -> ResourceModel:
        """The model of section 2.3 for a model's dimensions and a device's peak rates.

        Args:
            kv_size: elements of the keys of one token in one layer: KV heads times head dimension.
            dtype_bytes: of an element of KV, with its part of a row's scale.

        Raises: ConfigError if a value is not positive.
        """
        values = {
            "parameters": parameters,
            "hidden_size": hidden_size,
            "kv_size": kv_size,
            "num_layers": num_layers,
            "flops_per_s": flops_per_s,
            "bytes_per_s": bytes_per_s,
            "dtype_bytes": dtype_bytes,
        }
        for name, value in values.items():
            if not value > 0:
                raise ConfigError(f"must be positive, got {value}", field=name)
        return ResourceModel(
            token_s=2 * parameters / flops_per_s,
            prompt_pair_s=4 * hidden_size * num_layers / flops_per_s,
            cached_token_s=2 * dtype_bytes * kv_size * num_layers / bytes_per_s,
        )

    def prefill_s(self, start: Number, end: Number) -> Number:
        """Seconds of compute of the prompt tokens ``[start, end)``, whose predecessors are cached."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return self.token_s * (end - start) + self.prompt_pair_s * pairs

    def compute_s(
        self, num_prompt_tokens: float, num_output_tokens: float, num_shared_tokens: float = 0
    ) -> float:
        """Comp(r): seconds of compute of a request, less those of its first ``num_shared_tokens``."""
        prefill_s = self.prefill_s(float(num_shared_tokens), float(num_prompt_tokens))
        return prefill_s + self.token_s * num_output_tokens

    def memory_s(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """Mem(r): seconds that a request's decode steps spend reading its KV."""
        output = float(num_output_tokens)
        return self.expected_memory_s(float(num_prompt_tokens), output, output * output)

    def use_of(self, tokens_per_s: float, reads_per_s: float) -> OnlineUse:
        """What online traffic uses, by the tokens it computes and the cached ones that its decodes read."""
        return OnlineUse(self.token_s * tokens_per_s, self.cached_token_s * reads_per_s)

    def expected_memory_s(self, num_prompt_tokens: Number, mean: Number, mean_square: Number) -> Number:
        """E[Mem(r)] of a random output length d, from E[d] and E[d^2]."""
        return self.cached_token_s * (num_prompt_tokens * mean + mean_square / 2)


class Cost(NamedTuple):
    """Expected seconds of each resource."""

    compute_s: float
    memory_s: float


class Expected(NamedTuple):
    """What a request is expected to generate and to cost."""

    output_tokens: float
    cost: Cost


@dataclass(slots=True)
class Work:
    """A sum of expected compute and memory time, in seconds."""

    compute_s: float = 0.0
    memory_s: float = 0.0

    def add(self, compute_s: float, memory_s: float) -> None:
        self.compute_s += compute_s
        self.memory_s += memory_s

    def remove(self, compute_s: float, memory_s: float) -> None:
        """Rounding never leaves less than nothing."""
        self.compute_s = max(self.compute_s - compute_s, 0.0)
        self.memory_s = max(self.memory_s - memory_s, 0.0)

    @property
    def density(self) -> float:
        """Compute over memory time (section 3.2); 0 where there is no work."""
        if self.memory_s > 0:
            return self.compute_s / self.memory_s
        return math.inf if self.compute_s > 0 else 0.0

    @property
    def time_s(self) -> float:
        """Least seconds that it takes: both resources perfectly overlapped (section 2.4)."""
        return max(self.compute_s, self.memory_s)


@dataclass(frozen=True, slots=True)
class OnlineUse:
    """What online traffic uses of the device, in seconds of each resource per second.

    Raises: ConfigError for a negative or infinite value.
    """

    compute_frac: float = 0.0
    memory_frac: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_frac", "memory_frac"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"must be finite and at least 0, got {value}", field=name)

    def moved_towards(self, other: OnlineUse, weight: float) -> OnlineUse:
        """The mean of both, in which ``other`` has this weight."""
        return OnlineUse(
            self.compute_frac + weight * (other.compute_frac - self.compute_frac),
            self.memory_frac + weight * (other.memory_frac - self.memory_frac),
        )


def target_density(left: Work, current: OnlineUse, long_run: OnlineUse) -> float:
    """The density that offline work should have now, so that online and offline work together keep theirs.

    ``left`` is what is left of the pool. Without online work, or while it uses what it does in the long
    run, that is the density of what is left. docs/blending.md derives the rest.
    """
    if left.memory_s <= 0 or current == long_run:
        return left.density
    most_frac = 1 - LEAST_OFFLINE_FRAC
    online_compute = min(long_run.compute_frac, most_frac)
    online_memory = min(long_run.memory_frac, most_frac)
    end_s = max(left.compute_s / (1 - online_compute), left.memory_s / (1 - online_memory))
    mix = (left.compute_s + online_compute * end_s) / (left.memory_s + online_memory * end_s)
    # A full device: the resource that the mix needs more of is busy all the time.
    offline_memory = max(min(1.0, 1 / mix) - current.memory_frac, LEAST_OFFLINE_FRAC) if mix > 0 else 1.0
    return max(mix + (mix * current.memory_frac - current.compute_frac) / offline_memory, 0.0)
