"""Which divisions a model allows, and which layers each stage has."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.errors import ConfigError
from backfill.models.config import Architecture, ModelConfig
from backfill.models.placement import ModelPlacement, check_parallel, stage_layers, tensor_parallel_sizes
from backfill.models.rope import RopeConfig
from backfill.models.shard import ShardSizes
from backfill.models.tensor_shapes import layer_parameters, num_parameters
from tests.models.tiny import CONFIGS

SMOLLM2 = ModelConfig(  # SmolLM2-135M
    Architecture.LLAMA,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    hidden_act="silu",
    rope=RopeConfig(theta=100_000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    sliding_window=None,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)


def test_other_sizes_are_refused_with_the_allowed_ones() -> None:
    for size in (1, 3, 9):
        check_parallel(SMOLLM2, size, 1)
    with pytest.raises(ConfigError) as refused:
        check_parallel(SMOLLM2, 4, 1)
    assert str(refused.value) == (
        "`tensor_parallel_size` 4: the model has 9 attention heads and 3 KV heads; use 1, 3 or 9."
    )
    alone = replace(SMOLLM2, num_heads=1, num_kv_heads=1)
    with pytest.raises(ConfigError, match=r"2: the model has 1 attention heads; use 1\.$"):
        check_parallel(alone, 2, 1)
    check_parallel(SMOLLM2, 1, 30)
    with pytest.raises(ConfigError, match=r"`pipeline_parallel_size` 31: the model has 30 layers; use 1 to"):
        check_parallel(SMOLLM2, 1, 31)
    with pytest.raises(ConfigError, match=r"has 1 layers; use 1\.$"):
        check_parallel(replace(SMOLLM2, num_layers=1), 1, 2)
    wide = replace(SMOLLM2, num_heads=16, num_kv_heads=16)
    check_parallel(wide, 16, 4)
    with pytest.raises(
        ConfigError, match="`tensor_parallel_size` 16 times `pipeline_parallel_size` 8 is 128"
    ):
        check_parallel(wide, 16, 8)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (32, 8, [1, 2, 4, 8, 16, 32]),
        (14, 2, [1, 2, 14]),
        (12, 12, [1, 2, 3, 4, 6, 12]),
        (12, 4, [1, 2, 4, 12]),  # 3 ranks would share 4 KV heads
        (7, 1, [1, 7]),
    ],
)
def test_kv_heads_are_divided_or_replicated(heads: int, kv_heads: int, sizes: list[int]) -> None:
    config = replace(SMOLLM2, num_heads=heads, num_kv_heads=kv_heads)
    assert tensor_parallel_sizes(config) == sizes
    for size in sizes:
        for rank in range(size):
            shard = ShardSizes(config, range(1), rank, size)
            group = heads // kv_heads
            needed = {head // group for head in range(shard.heads.start, shard.heads.stop)}
            assert needed == set(range(shard.kv_heads.start, shard.kv_heads.stop))
            assert shard.heads.length % shard.kv_heads.length == 0


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 16))
def test_parts_cover_a_dimension_and_rank_0_has_the_most(vocab: int, inner: int, size: int) -> None:
    config = replace(SMOLLM2, vocab_size=vocab, intermediate_size=inner)
    shards = [ShardSizes(config, range(1), rank, size) for rank in range(size)]
    for parts in ([each.vocabulary for each in shards], [each.inner for each in shards]):
        held = [index for part in parts for index in range(part.start, part.stop)]
        assert held == list(range(parts[0].size))
        assert parts[0].length == max(part.length for part in parts)
    assert all(each.vocabulary.length <= each.vocabulary_rows for each in shards)
    assert max(shards, key=lambda each: each.layer_parameters) == shards[0]


def test_the_inner_dimension_is_divided_at_multiples_of_32_where_each_rank_gets_one() -> None:
    def lengths(inner: int, size: int) -> list[int]:
        config = replace(SMOLLM2, intermediate_size=inner)
        return [ShardSizes(config, range(1), rank, size).inner.length for rank in range(size)]

    assert lengths(29568, 8) == [3712] * 4 + [3680] * 4  # Qwen2-72B
    assert lengths(96, 2) == [64, 32]
    assert lengths(96, 4) == [24] * 4
    assert lengths(80, 2) == [40, 40]


def test_one_rank_has_all_parameters(tmp_path: Path) -> None:
    for kind, (config_type, values) in CONFIGS.items():
        names = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "opt": "OPT", "llama": "Llama"}
        architecture = f"{names[config_type.model_type]}ForCausalLM"
        config_type(**values, architectures=[architecture]).save_pretrained(tmp_path / kind)
        config = ModelConfig.from_folder(tmp_path / kind)
        whole = ModelPlacement.of(config).sizes(0)
        others = whole.table_parameters + whole.other_parameters
        assert config.num_layers * whole.layer_parameters + others == num_parameters(config)
        first, middle, last = map(ModelPlacement.of(config, 1, 3).sizes, range(3))
        assert first.other_parameters + last.other_parameters == whole.other_parameters
        table = config.vocab_size * config.embedding_size
        assert (first.table_parameters, middle.table_parameters, last.table_parameters) == (table, 0, table)
        assert whole.table_parameters == table * (1 if config.tie_word_embeddings else 2)


def test_the_output_projection_of_every_other_token_is_worth_four_layers_of_smollm2() -> None:
    assert stage_layers(SMOLLM2, 1) == (range(30),)
    assert stage_layers(SMOLLM2, 2) == (range(17), range(17, 30))
    assert [len(each) for each in stage_layers(SMOLLM2, 3)] == [11, 11, 8]
    assert [len(each) for each in stage_layers(SMOLLM2, 30)] == [1] * 30


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 20000))
def test_no_division_has_a_faster_slowest_stage(num_layers: int, num_stages: int, vocab: int) -> None:
    num_stages = min(num_stages, num_layers)
    config = replace(SMOLLM2, num_layers=num_layers, vocab_size=vocab, hidden_size=64)

    def slowest(stops: tuple[int, ...]) -> int:
        counts = [stop - start for start, stop in zip((0, *stops), (*stops, num_layers), strict=True)]
        costs = [count * layer_parameters(config) for count in counts]
        costs[-1] += vocab * config.hidden_size // 2
        return max(costs)

    stages = stage_layers(config, num_stages)
    assert [index for stage in stages for index in stage] == list(range(num_layers))
    assert all(len(stage) for stage in stages)
    best = min(map(slowest, combinations(range(1, num_layers), num_stages - 1)))
    assert slowest(tuple(stage.stop for stage in stages[:-1])) == best


def test_ranks_are_numbered_stage_by_stage() -> None:
    placement = ModelPlacement.of(SMOLLM2, 3, 2)
    assert placement.num_ranks == 6
    found = [(placement.sizes(rank).layers.start, placement.sizes(rank).rank) for rank in range(6)]
    assert found == [(0, 0), (0, 1), (0, 2), (17, 0), (17, 1), (17, 2)]
