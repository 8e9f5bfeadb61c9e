"""What has device memory, and how many KV blocks there are: decided before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from backfill.core.config import GIB
from backfill.core.errors import InsufficientMemory
from backfill.execution.machine import at_most
from backfill.models.shard import ShardSizes
from backfill.offloading.interval import num_device_layers, offloaded_layers


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of weights in one memory: of each layer, and of all outside the layers.

    Attributes:
        stage_layers: layers of each stage of the model that has its weights there.
    """

    stage_layers: tuple[int, ...]
    layer_bytes: int
    other_bytes: int

    @classmethod
    def of(cls, shards: Sequence[ShardSizes], in_layers: float, in_tables: float, other: int) -> WeightSizes:
        """Of what lies in one memory: one rank's shard, or all ranks' shards of a model.

        Args:
            in_layers, in_tables, other: bytes of a weight: on average in layers and in tables of the
                vocabulary, and of all others.
        """
        stages = dict.fromkeys(each.layers for each in shards)
        of_stage = (each for each in shards if each.layers == shards[0].layers)
        layer_bytes = math.ceil(in_layers * sum(each.layer_parameters for each in of_stage))
        tables = math.ceil(in_tables * sum(each.table_parameters for each in shards))
        others = other * sum(each.other_parameters for each in shards)
        return cls(tuple(map(len, stages)), layer_bytes, tables + others)

    @property
    def num_layers(self) -> int:
        return sum(self.stage_layers)

    def num_offloaded(self, interval: int | None) -> int:
        """Each stage offloads one of so many of its own layers; None: without offloading."""
        return sum(len(offloaded_layers(each, interval)) for each in self.stage_layers)

    def num_device_layers(self, interval: int | None) -> int:
        """Resident layers and staging buffers of all stages."""
        return sum(num_device_layers(each, interval) for each in self.stage_layers)

    def device_bytes(self, interval: int | None) -> int:
        """With the staging buffers of an offloading interval; None: without offloading."""
        return self.other_bytes + self.num_device_layers(interval) * self.layer_bytes

    def host_layers_bytes(self, interval: int | None) -> int:
        """Of all layers, which a device that is not the host keeps there too if some are offloaded."""
        return 0 if interval is None else self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What lies in device memory.

    Attributes:
        num_layers, num_offloaded: those with weights there, and those of them that are offloaded.
        num_device_layers: layers' worth of memory, resident layers and staging buffers together.
        weights_bytes: these layers and all weights outside the layers.
        activation_bytes: the most that a step takes beside weights and KV; counted only against a limit.
    """

    num_layers: int
    num_offloaded: int
    num_device_layers: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_blocks: int


def activation_bytes(shard: ShardSizes, max_num_tokens: int, max_num_seqs: int, dtype_bytes: int) -> int:
    """An estimate of what a step takes on a rank beside weights and KV.

    A layer's input, sum and projections for each token. For each sampled row, on the last stage, the rank's
    logits, and on its rank 0 those of all ranks and two float32 tensors of the sampler.
    """
    config = shard.config
    heads = (2 * shard.heads.length + 2 * shard.kv_heads.length) * config.head_dim
    of_token = (4 * config.hidden_size + heads + 3 * shard.inner.length) * dtype_bytes
    of_row = 0
    if shard.is_last and shard.size > 1:
        of_row += shard.vocabulary_rows * dtype_bytes
    if shard.is_last and shard.rank == 0:
        of_row += config.vocab_size * (dtype_bytes + 8)
    return max_num_tokens * of_token + max_num_seqs * of_row


def plan_memory(
    weights: WeightSizes,
    *,
    device: str,
    block_bytes: int,
    default_kv_bytes: int | None,
    interval: int | None = None,
    kv_bytes: int | None = None,
    limit_bytes: int | None = None,
    activation_bytes: int = 0,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """Divide a device's memory.

    Args:
        default_kv_bytes: size of the KV pool if none is asked for; None: nine tenths of what is left.
        interval: every so many layers one is offloaded; None: none is.
        kv_bytes: size of the KV pool that is asked for.
        limit_bytes: for weights, activations and KV together; the pool is then what is left, unless a size
            is asked for. None: no limit but the memory available.
        available_bytes: what the device has; None: unknown.
    Raises:
        InsufficientMemory: something does not fit; the message says what would.
    """
    weights_bytes = weights.device_bytes(interval)
    if limit_bytes is not None:
        left = limit_bytes - weights_bytes - activation_bytes
        needed = block_bytes if kv_bytes is None else kv_bytes
        if left < needed:
            raise InsufficientMemory(_over_limit(weights, interval, activation_bytes, needed, limit_bytes))
        kv_bytes = left if kv_bytes is None else kv_bytes
    elif kv_bytes is None:
        kv_bytes = default_kv_bytes
        if kv_bytes is None:
            assert available_bytes is not None
            kv_bytes = max(1, int((available_bytes - weights_bytes) * 0.9))
    check_pool_fits(
        kv_bytes, device=device, available_bytes=available_bytes, weights=weights, interval=interval
    )
    return MemoryPlan(
        weights.num_layers,
        weights.num_offloaded(interval),
        weights.num_device_layers(interval),
        weights_bytes,
        activation_bytes,
        kv_bytes,
        num_blocks=kv_bytes // block_bytes,
    )


def check_pool_fits(
    kv_bytes: int,
    *,
    device: str,
    available_bytes: int | None,
    weights: WeightSizes | None = None,
    interval: int | None = None,
) -> None:
    """Refuse a KV pool that does not fit beside the weights, or not even alone.

    Args:
        available_bytes: what the device has; None: unknown.
        weights: None: not known yet.
        interval: every so many layers one is offloaded; None: none is.
    Raises: InsufficientMemory.
    """
    weights_bytes = 0 if weights is None else weights.device_bytes(interval)
    if available_bytes is None or weights_bytes + kv_bytes <= available_bytes:
        return
    pool, has = f"{kv_bytes / GIB:.2f} GiB", f"{available_bytes / GIB:.2f} GiB are available"
    if weights is None:
        raise InsufficientMemory(
            f"Not enough memory on {device}: the KV pool needs {pool}, and {has}, for the weights too; "
            "lower `kv_gib`."
        )
    advice = (
        at_most("`kv_gib`", available_bytes - weights_bytes)
        or _fitting_interval(weights, interval, available_bytes)
        or "the weights alone do not fit; use a smaller model"
    )
    raise InsufficientMemory(
        f"Not enough memory on {device}: the weights need {weights_bytes / GIB:.2f} GiB and the KV pool "
        f"{pool}, and {has}; {advice}."
    )


def _over_limit(
    weights: WeightSizes, interval: int | None, activation_bytes: int, kv_bytes: int, limit_bytes: int
) -> str:
    others = activation_bytes + kv_bytes
    weights_bytes = weights.device_bytes(interval)
    least_gib = -(-(weights_bytes + others) * 1000 // GIB) / 1000  # rounded up: the advice must suffice
    advice = [f"raise `device_memory` to {least_gib:.3f} or more"]
    if smaller_pool := at_most("`kv_gib`", limit_bytes - weights_bytes - activation_bytes):
        advice.append(smaller_pool)
    if fitting := _fitting_interval(weights, interval, limit_bytes - others):
        advice.append(fitting)
    return (
        f"`device_memory` {limit_bytes / GIB:.3f} GiB is too small with `offload_interval` "
        f"{interval or 'none'}: the weights on the device need {weights_bytes / GIB:.3f} GiB, activations "
        f"{activation_bytes / GIB:.3f} GiB and the KV pool at least {kv_bytes / GIB:.2g} GiB; "
        f"{', or '.join(advice)}."
    )


def _fitting_interval(weights: WeightSizes, interval: int | None, limit_bytes: int) -> str | None:
    """Advice: the largest interval, below this one, with which the weights fit."""
    largest = max(weights.stage_layers) if interval is None else interval - 1
    for smaller in range(largest, 0, -1):
        if weights.num_offloaded(smaller) and weights.device_bytes(smaller) <= limit_bytes:
            return f"use `offload_interval` {smaller}" + (" or less" if smaller > 1 else "")
    return None
