"""A cost profile: a fitted cost model and what it was measured on, saved as a JSON file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from backfill.core.measured_on import MeasuredFile, MeasuredOn
from backfill.costs.model import CostModel, NonNegative

Quality = Literal["coarse", "refined", "full"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Speed = Annotated[float, msgspec.Meta(gt=0.0, le=sys.float_info.max)]

# A profile whose P95 error is larger bounds no time from below.
_MOST_CERTAIN_ERROR = 0.5
# A shared machine may be faster than when it was measured, by up to this fraction.
_SPEED_VARIES = 0.25


@dataclass(frozen=True, slots=True)
class FitError:
    """|predicted - measured| / measured over a set of steps.

    Attributes:
        ratio_quantiles: measured over predicted times at evenly spaced probabilities from 0 to 1; empty where
            only the errors are known.
    """

    median: NonNegative
    p95: NonNegative
    num_steps: Count
    ratio_quantiles: tuple[NonNegative, ...] = ()


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """Speed of KV block copies between device and host memory, one after another, on an idle machine.

    Attributes:
        interference: seconds by which a step becomes longer for each second of copying beside it, in the
            slower direction; 0 if not measured.
    """

    to_host_bytes_per_s: Speed
    to_device_bytes_per_s: Speed
    interference: NonNegative = 0.0

    def block_copy_s(self, block_bytes: int) -> float:
        """Seconds to copy one KV block in the slower direction."""
        return block_bytes / min(self.to_host_bytes_per_s, self.to_device_bytes_per_s)


@dataclass(frozen=True, slots=True)
class CostProfile(MeasuredFile):
    """A fitted cost model, the steps it was fitted to, and its error.

    Attributes:
        quality: ``coarse``: measured within a second at the start of an engine; ``refined``: fitted again to
            served steps; ``full``: measured by ``backfill profile``.
        num_layers: decoder layers in a step.
        error: on steps that the model was not fitted to.
        known_tokens: the farthest prompt position in the fitted steps. Beyond it the model extrapolates.
        known_chunk_tokens: most tokens of one prompt in one of these steps.
        copies: None if not measured.
        provenance: how the profile was measured, as text.
    """

    KIND = "profile"
    FORMAT = 4
    REMEDY = "run `backfill profile` for the model to measure it again."

    key: MeasuredOn
    quality: Quality
    num_layers: Annotated[int, msgspec.Meta(ge=1)]
    cost: CostModel
    error: FitError
    known_tokens: Count
    known_chunk_tokens: Count
    copies: CopySpeed | None
    provenance: str

    @property
    def certain_share(self) -> float:
        """The fraction of a predicted time that a step takes at least; 0 if the profile is too coarse to say.

        The rest allows for the P95 of the error and for a machine that is faster than when it was measured.
        """
        if self.quality == "coarse" or self.error.p95 > _MOST_CERTAIN_ERROR:
            return 0.0
        return 1.0 - self.error.p95 - _SPEED_VARIES

    def block_copy_s(self, block_bytes: int) -> float | None:
        """Seconds to copy one KV block in the slower direction; None if not measured."""
        return None if self.copies is None else self.copies.block_copy_s(block_bytes)

    @property
    def copy_interference(self) -> float:
        """See ``CopySpeed.interference``; 0 if no copies were measured."""
        return 0.0 if self.copies is None else self.copies.interference
