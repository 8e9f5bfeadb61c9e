"""Configuration of rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from backfill.models.fields import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head; the comments name the kinds that read a field.

    ``original_max_position_embeddings`` is in tokens. With ``attention_factor`` None, YaRN derives it from
    ``factor``.
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
    """From ``rope_parameters`` of config.json (transformers 5), or ``rope_scaling`` and ``rope_theta`` (4).

    ``positions`` is its ``max_position_embeddings``, in tokens.

    Raises:
        CorruptModel: a value has the wrong type or range.
        UnsupportedModel: another kind, a rope for each layer type, or one over part of the head.
    """
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    rope = rope or Fields(fields.path, {})
    holder = rope if "rope_theta" in rope.values else fields
    theta = holder.positive("rope_theta", 10_000.0, is_nullable=False)
    for section in (fields, rope):
        if section.positive("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported(
                "partial_rotary_factor", str(section.values["partial_rotary_factor"]), ("1.0",)
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
