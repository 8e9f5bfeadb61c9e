"""Rotary position embedding: its kinds, what a configuration says of it, its frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from backfill.models.fields import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head; a field after ``kind`` belongs to the kinds named.

    ``original_max_position_embeddings`` is in tokens. ``attention_factor`` None means "as YaRN derives it
    from ``factor``".
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    attention_factor: float | None = None  # yarn


def rope_config(fields: Fields, positions: int) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (4).

    Args:
        fields: config.json.
        positions: its ``max_position_embeddings``, in tokens.
    Raises:
        CorruptModel: a value has the wrong type or range.
        UnsupportedModel: another kind, one for each layer type, or over part of the head.
    """
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    rope = rope or Fields(fields.path, {})
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10_000.0))
    for holder in (fields, rope):
        if holder.positive("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported(
                "partial_rotary_factor", str(holder.values["partial_rotary_factor"]), ("1.0",)
            )
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.unsupported(
            "a rope for each layer type,", ", ".join(rope.values), ("one for all layers",)
        )
    if theta <= 1:
        raise fields.wrong("rope_theta", "above 1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = fields.size("original_max_position_embeddings", positions)
    if fields.values.get("original_max_position_embeddings") is None:
        original = rope.size("original_max_position_embeddings", positions)
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=rope.positive("factor"))
        case "llama3":
            low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
            if high <= low:
                raise rope.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=rope.positive("factor"),
                original_max_position_embeddings=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=rope.positive("factor", positions / original),
                original_max_position_embeddings=original,
                beta_fast=rope.positive("beta_fast", 32.0),
                beta_slow=rope.positive("beta_slow", 1.0),
                truncate=rope.flag("truncate", True),
                mscale=rope.optional_number("mscale") or 0.0,
                mscale_all_dim=rope.optional_number("mscale_all_dim") or 0.0,
                attention_factor=rope.optional_number("attention_factor"),
            )
    raise fields.unsupported("rope type", kind, get_args(RopeKind))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[npt.NDArray[np.float32], float]:
    """Angle per position of each rotated pair, and the factor on cosine and sine.

    Returns: float32 ``[head_dim / 2]``, and 1.0 but for YaRN. Pair i is elements (i, i + head_dim / 2).
    Computed in float32 step by step as transformers does: a difference in the last bit is multiplied by
    the position, so a more precise result would be a different model at long contexts.
    Source: transformers ``modeling_rope_utils.ROPE_INIT_FUNCTIONS``.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(np.float32(rope.theta), exponents)
    frequencies = (np.float32(1.0) / periods).astype(np.float32)
    match rope.kind:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3_frequencies(frequencies, rope), 1.0
        case "yarn":
            return _yarn_frequencies(periods, rope, head_dim), _yarn_attention_factor(rope)


def _llama3_frequencies(frequencies: npt.NDArray[np.float32], rope: RopeConfig) -> npt.NDArray[np.float32]:
    """Long wavelengths divided by ``factor``, short ones kept, those between interpolated."""
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = frequencies / np.float32(rope.factor)
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled + smooth * frequencies
    result = np.where(wavelengths > context / low, scaled, blended)
    return np.where(wavelengths < context / high, frequencies, result).astype(np.float32)


def _yarn_frequencies(
    periods: npt.NDArray[np.float32], rope: RopeConfig, dim: int
) -> npt.NDArray[np.float32]:
    """Blend of kept and stretched frequencies over the range of dimensions YaRN's betas span."""

    def dimension_turning(rotations: float) -> float:
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept = np.float32(1) - ramp
    stretched = np.float32(1) / (np.float32(rope.factor) * periods)
    blended: npt.NDArray[np.float32] = stretched * (1 - kept) + (np.float32(1) / periods) * kept
    return blended.astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor on cosine and sine, which sharpens attention over a stretched context."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
