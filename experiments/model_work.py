"""What a decoder computes and moves, operator by operator, and the least time that a device needs for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from backfill.costs.load import StepLoad

VALUE_BYTES = 2  # fp16
GIB = 2**30
# Shares of a device's peaks that modelled kernels reach (docs/hardware-profiles.md).
FLOPS_FRAC = 0.55
BANDWIDTH_FRAC = 0.8
SAMPLER_PASSES = 4  # over a row of fp32 logits
ACTIVATIONS_BYTES = 1.5 * GIB
MEMORY_FRAC = 0.9

# How often each operator occurs in a decoder layer, without attention.
LAYER_OPERATORS = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Attributes:
        memory_bytes: as CUDA reports it, somewhat below the nominal size.
        bandwidth: of its memory, nominal bytes a second.
        flops: nominal fp16 FLOPs a second of its tensor cores, dense.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float

    @property
    def memory_rate(self) -> float:
        """Bytes a second that memory-bound kernels reach."""
        return self.bandwidth * BANDWIDTH_FRAC

    @property
    def usable_bytes(self) -> float:
        """Memory for weights and KV: what an engine takes of the device, less a step's activations."""
        return self.memory_bytes * MEMORY_FRAC - ACTIVATIONS_BYTES


class Work(NamedTuple):
    """What an operator computes and moves on one device."""

    flops: float
    num_bytes: float

    def roofline_s(self, device: Device) -> float:
        """Least seconds."""
        return max(self.num_bytes / device.bandwidth, self.flops / device.flops)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes.

    Attributes:
        is_opt: a layer of OPT: an MLP without gate, learned positions and tied embeddings. Else Llama's.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocab: int
    max_model_len: int
    is_opt: bool = False

    @property
    def kv_width(self) -> int:
        return self.hidden // self.num_heads * self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.kv_width * VALUE_BYTES

    @property
    def layer_bytes(self) -> int:
        """Weights of one decoder layer."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        if self.is_opt:  # with biases and two values of a norm
            mlp = 2 * self.hidden * self.intermediate + 9 * self.hidden + self.intermediate
        else:
            mlp = 3 * self.hidden * self.intermediate + 2 * self.hidden
        return VALUE_BYTES * (attention + mlp)

    @property
    def other_weight_bytes(self) -> int:
        """Weights outside the layers."""
        if self.is_opt:  # two position rows are reserved
            return VALUE_BYTES * (self.vocab + self.max_model_len + 4) * self.hidden
        return VALUE_BYTES * (2 * self.vocab + 1) * self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.num_layers * self.layer_bytes + self.other_weight_bytes

    @property
    def layer_operators(self) -> dict[str, int]:
        """How often each operator occurs in a layer."""
        absent = "attn_rope" if self.is_opt else None
        return {name: count for name, count in LAYER_OPERATORS.items() if name != absent}


def operator_work(shape: ModelShape, num_tokens: int, num_devices: int) -> dict[str, Work]:
    """Work of each operator on one of the devices that share the model.

    Each device has its part of the heads and of the MLP, and the whole of the norms, additions and rows of
    the embedding. Biases are left out.
    """
    n, h, kv = num_tokens, shape.hidden, shape.kv_width // num_devices
    heads, ffn = shape.hidden // num_devices, shape.intermediate // num_devices

    def product(inner: int, outer: int) -> Work:
        return Work(2 * n * inner * outer, VALUE_BYTES * (inner * outer + n * (inner + outer)))

    def row_wise(values: int) -> Work:
        return Work(0, VALUE_BYTES * n * values)

    work = {
        # OPT looks up a token and a position and adds them.
        "emb": row_wise(7 * h if shape.is_opt else 2 * h),
        "input_layernorm": row_wise(2 * h),
        "attn_pre_proj": product(h, heads + 2 * kv),
        "attn_rope": row_wise(2 * (heads + kv)),
        "attn_post_proj": product(heads, h),
        "post_attention_layernorm": row_wise(2 * h),
        "mlp_up_proj": product(h, ffn if shape.is_opt else 2 * ffn),
        "mlp_act": row_wise(2 * ffn if shape.is_opt else 3 * ffn),
        "mlp_down_proj": product(ffn, h),
        "add": row_wise(3 * h),
    }
    return {name: each for name, each in work.items() if name == "emb" or name in shape.layer_operators}


def kv_write_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Bytes that one layer moves to store the KV of a step: read, then written."""
    return 2 * num_tokens * shape.kv_bytes_per_token // shape.num_layers


def modelled_time_s(shape: ModelShape, device: Device, num_devices: int, load: StepLoad) -> float:
    """Seconds of attention, the output projection and sampling, from their bytes and FLOPs.

    Prefill attention takes its arithmetic and then reads its context. Kernels overlap the two in part, so
    this is an upper bound.
    """
    rate, flops = device.memory_rate * num_devices, device.flops * FLOPS_FRAC * num_devices
    pair_s = 4 * shape.hidden * shape.num_layers / flops
    context_s = shape.kv_bytes_per_token / rate
    attention = load.prefill_pairs * pair_s
    attention += (load.prefill_context_tokens + load.decode_context_tokens) * context_s
    if not load.num_sampled:
        return attention
    weights = shape.vocab * shape.hidden
    output = max(weights * VALUE_BYTES / rate, 2 * weights * load.num_sampled / flops)
    logits_bytes = SAMPLER_PASSES * 4 * shape.vocab * load.num_sampled
    return attention + output + logits_bytes / device.memory_rate
