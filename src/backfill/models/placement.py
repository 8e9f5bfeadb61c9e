"""How a model lies on several ranks: whether it can be divided so, and which layers each stage has."""

from __future__ import annotations

from dataclasses import dataclass

from backfill.core.config import MAX_RANKS
from backfill.core.errors import ConfigError
from backfill.models.config import ModelConfig
from backfill.models.shard import ShardSizes
from backfill.models.tensor_shapes import layer_parameters


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """A model on ``len(stages) * tensor_parallel_size`` ranks.

    Rank ``stage * tensor_parallel_size + tensor_rank`` has a part of each layer of its stage.

    Attributes:
        stages: the layers of each pipeline stage.
    """

    config: ModelConfig
    tensor_parallel_size: int
    stages: tuple[range, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1
    ) -> ModelPlacement:
        """With stages balanced by cost. Raises: ConfigError if the model cannot be divided so."""
        check_parallel(config, tensor_parallel_size, pipeline_parallel_size)
        return cls(config, tensor_parallel_size, stage_layers(config, pipeline_parallel_size))

    @property
    def num_ranks(self) -> int:
        return len(self.stages) * self.tensor_parallel_size

    @property
    def most_layers(self) -> int:
        """Of a stage."""
        return max(map(len, self.stages))

    def sizes(self, rank: int) -> ShardSizes:
        stage, tensor_rank = divmod(rank, self.tensor_parallel_size)
        return ShardSizes(self.config, self.stages[stage], tensor_rank, self.tensor_parallel_size)

    def shards(self) -> list[ShardSizes]:
        """Of all ranks."""
        return [self.sizes(rank) for rank in range(self.num_ranks)]


def check_parallel(config: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise ConfigError, with the allowed values, if the model cannot be divided so."""
    allowed = tensor_parallel_sizes(config)
    if tensor_parallel_size not in allowed:
        kv_heads = "" if config.num_kv_heads == config.num_heads else f" and {config.num_kv_heads} KV heads"
        raise ConfigError(
            f"{tensor_parallel_size}: the model has {config.num_heads} attention heads{kv_heads}; "
            f"use {_listed(allowed)}.",
            field="tensor_parallel_size",
        )
    if not 1 <= pipeline_parallel_size <= config.num_layers:
        most = f"1 to {config.num_layers}" if config.num_layers > 1 else "1"
        raise ConfigError(
            f"{pipeline_parallel_size}: the model has {config.num_layers} layers; use {most}.",
            field="pipeline_parallel_size",
        )
    if (num_ranks := tensor_parallel_size * pipeline_parallel_size) > MAX_RANKS:
        raise ConfigError(
            f"`tensor_parallel_size` {tensor_parallel_size} times `pipeline_parallel_size` "
            f"{pipeline_parallel_size} is {num_ranks} processes, and at most {MAX_RANKS} are supported."
        )


def tensor_parallel_sizes(config: ModelConfig) -> list[int]:
    """Sizes with which all ranks have equally many heads, and the same KV heads or none in common."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    most = min(heads, config.intermediate_size)
    return [
        size
        for size in range(1, most + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def stage_layers(config: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """Divide the layers so that the slowest stage is as fast as can be. Each has at least one layer.

    A stage's cost is its multiplications for one token: the weights of its layers, and in the last stage half
    of those of the output projection. All decodes pass it and of a prompt the last token alone, so the whole
    of it would be right for decodes, and none for prompts. Looking an embedding up costs nothing.
    """
    assert 1 <= num_stages <= config.num_layers
    of_layer = layer_parameters(config)
    costs = [of_layer] * num_stages
    costs[-1] += config.vocab_size * config.embedding_size // 2
    counts = [1] * num_stages
    for _ in range(config.num_layers - num_stages):
        least = costs.index(min(costs))  # the first of equal ones: the last stage has the sampler, too
        costs[least] += of_layer
        counts[least] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _listed(values: list[int]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
