"""Frequencies of rotary position embeddings. A file of its own: their configuration needs no numpy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from backfill.models.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[npt.NDArray[np.float32], float]:
    """Angle per position of each rotated pair, and the factor on cosine and sine.

    Returns: float32 ``[head_dim / 2]``, and 1.0 except for YaRN. Pair i is elements (i, i + head_dim / 2).
    The float32 steps are those of transformers: the position multiplies a difference in the last bit, so a
    more precise result would be a different model at long contexts.
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
    """Low frequencies divided by ``factor``, high ones kept, those between interpolated."""
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
    """A blend of kept and stretched frequencies over the dimensions between YaRN's two betas."""

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
    """The factor on cosine and sine; it sharpens attention over a stretched context."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
