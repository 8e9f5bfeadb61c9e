"""The performance record of a model on a device: what steps cost, and so which interval holds an objective.

Select-N, section 4.4. The paper's record stores an interval for every objective; this one stores the times
that intervals follow from, and finds the interval of an objective when it is first asked for.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from backfill.core.errors import ConfigError
from backfill.core.json_file import load_json, save_json
from backfill.core.measured_on import MeasuredOn
from backfill.offloading.interval import LayerTimes, smallest_interval

FORMAT_VERSION = 1
_REMEDY = "run `backfill profile --offload` for the model to measure it again."

# Objectives are rounded down to multiples of this.
OBJECTIVE_GRAIN_S = 0.002

Phase = Literal["prefill", "decode"]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A step of requests that are alike, and what it takes without waiting for weights.

    Attributes:
        phase: ``prefill``: whole prompts; ``decode``: one token of each request.
        batch_size: requests.
        length: tokens of each prompt; or before each decoded token.
        compute_s: seconds for one layer.
        other_s: seconds outside the layers.
    """

    phase: Phase
    batch_size: Count
    length: Count
    compute_s: Seconds
    other_s: Seconds


@dataclass(frozen=True, slots=True)
class PerformanceRecord:
    """Times of a model's layers, from which the intervals follow.

    Loads between recorded ones count as the next larger recorded ones, in batch size and in length. What is
    beyond every recorded load has no interval: none that the record has would be conservative.

    Attributes:
        num_layers: decoder layers.
        layer_bytes: of the weights of one layer.
        transfer_s: seconds to transfer the weights of a layer; few transfers take longer.
        loads: in any order, none twice.
        provenance: how the record was measured, as text.
        max_num_seqs, max_num_batched_tokens: limits of steps when it was measured; larger loads are missing.
    """

    key: MeasuredOn
    num_layers: Count
    layer_bytes: Count
    transfer_s: Seconds
    loads: tuple[RecordedLoad, ...]
    provenance: str = ""
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048

    def times_of(self, load: RecordedLoad) -> LayerTimes:
        return LayerTimes(self.num_layers, load.compute_s, self.transfer_s, load.other_s)

    def find(self, phase: Phase, batch_size: int, length: int) -> RecordedLoad | None:
        """The next recorded load that is at least as large; None beyond the record."""
        larger = (
            each
            for each in self.loads
            if each.phase == phase and each.batch_size >= batch_size and each.length >= length
        )
        return min(larger, key=lambda each: (each.batch_size, each.length), default=None)

    def smallest_interval(self, phase: Phase, batch_size: int, length: int, objective_s: float) -> int | None:
        """The smallest interval with which such a step takes at most ``objective_s``.

        None if only no offloading might do, and beyond the record.
        """
        load = self.find(phase, batch_size, length)
        if load is None:
            return None
        return _smallest_interval(self.times_of(load), grains(objective_s))

    def save(self, path: Path) -> None:
        """Write the file atomically; after an OSError it is unchanged, and no other file is left."""
        save_json(path, {"format": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> PerformanceRecord:
        """Raises: ConfigError naming the file if it cannot be read, is no record or has wrong values."""
        content = load_json(path, "performance record", _REMEDY)
        if not isinstance(content, dict) or content.get("format") != FORMAT_VERSION:
            raise ConfigError(f"The performance record {path} is not of format {FORMAT_VERSION}: {_REMEDY}")
        try:
            return msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"The performance record {path} is damaged ({error}): {_REMEDY}") from error

    def check_key(self, key: MeasuredOn, name: str) -> None:
        """Raises: ConfigError, saying what differs, if the record was measured on something else."""
        self.key.check(key, f"performance record {name}", _REMEDY)


def grains(objective_s: float) -> int:
    """An objective in whole ``OBJECTIVE_GRAIN_S``, rounded down; one that is a multiple stays."""
    return math.floor(objective_s / OBJECTIVE_GRAIN_S + 1e-6)


@functools.lru_cache(maxsize=1 << 14)
def _smallest_interval(times: LayerTimes, num_grains: int) -> int | None:
    return smallest_interval(times, num_grains * OBJECTIVE_GRAIN_S)
