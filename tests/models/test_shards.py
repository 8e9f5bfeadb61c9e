"""Models divided over ranks: the logits of the whole model, from no more than a part of it each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backfill.core.block import KVLayout, pack_block_ref
from backfill.core.plan import ScheduledSlice
from backfill.core.request import RequestId
from backfill.execution.batch import FlatBatch, build_batch
from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels
from backfill.models.build import build_model
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.decoder import DecoderModel, HiddenState
from backfill.models.placement import ModelPlacement
from backfill.models.shard import ModelShard, ShardSizes, SoleRank
from backfill.models.weights import Checkpoint, Part
from tests.kernels.batches import unset_kv
from tests.kernels.reference import ReferenceKernels
from tests.models.ranks import Exchange, ThreadGroup, on_ranks
from tests.models.tiny import CONFIGS, save_tiny_llama_config, save_tiny_model

BLOCK_SIZE = 8
CPU = torch.device("cpu")
LENGTHS = (2, 7, 40)  # of prompts, which are computed in two chunks
SIZES = {  # tensor_parallel_size, pipeline_parallel_size; there are 6 heads, 3 layers and 199 token ids
    "llama": [(1, 1), (2, 1), (6, 1), (1, 2), (1, 3), (2, 3)],  # 2 KV heads: 6 ranks have them three times
    "opt": [(1, 1), (2, 1), (3, 1), (6, 1), (1, 2), (1, 3), (3, 2)],
}
FULLY = ["llama-biased", "qwen3", "opt-350m"]  # of others, the whole model and the most ranks
CASES = [
    (kind, *sizes)
    for kind in CONFIGS
    for of_kind in (SIZES["opt" if "opt" in kind else "llama"],)
    for sizes in (of_kind if kind in FULLY else (of_kind[0], of_kind[-1]))
]


@dataclass
class CountingCheckpoint(Checkpoint):
    """Counts the elements of each tensor that are read through it."""

    inner: Checkpoint
    num_read: Counter[str] = field(default_factory=Counter)
    num_stored: dict[str, int] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.inner.dtype

    @property
    def digest(self) -> str:
        return self.inner.digest

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        tensor = self.inner.get(name, shape, part)
        self.num_read[name] += tensor.numel()
        self.num_stored[name] = torch.Size(shape).numel()
        return tensor


def prompts_of(config: ModelConfig) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, config.vocab_size, (length,), generator=generator) for length in LENGTHS]


def chunks_of(prompts: Sequence[Tensor]) -> list[FlatBatch]:
    """The first halves of all prompts, then the rest; every row is sampled from."""
    slices: list[list[ScheduledSlice]] = [[], []]
    next_block = 0
    for index, prompt in enumerate(prompts):
        num_blocks, half = -(-len(prompt) // BLOCK_SIZE), len(prompt) // 2
        blocks = tuple(pack_block_ref(next_block + i, reverse=i % 2 == 1) for i in range(num_blocks))
        next_block += num_blocks
        for chunk, (start, stop) in zip(slices, ((0, half), (half, len(prompt))), strict=True):
            chunk.append(ScheduledSlice(RequestId(str(index)), start, stop - start, blocks, samples=True))
    return [
        build_batch(
            chunk,
            [
                prompt[each.start : each.start + each.num_tokens].numpy()
                for prompt, each in zip(prompts, chunk, strict=True)
            ],
            BLOCK_SIZE,
            CPU,
        )
        for chunk in slices
    ]


def run_stage(
    model: DecoderModel,
    batches: Sequence[FlatBatch],
    states: Sequence[HiddenState] | None,
    kv_dtype: torch.dtype,
) -> tuple[list[HiddenState], list[Tensor | None]]:
    """Run a stage's layers on each batch, one after the other, over a KV pool of their own."""
    shard, config = model.shard, model.config
    sizes = shard.sizes(config)
    of_rows = len(shard.layers), sizes.kv_heads.length, config.head_dim
    layout = KVLayout(*of_rows, BLOCK_SIZE, kv_dtype.itemsize)
    pool = torch.full(layout.shape(16), unset_kv(kv_dtype), dtype=kv_dtype)
    results, logits = [], []
    for number, batch in enumerate(batches):
        state = model.embed(batch.token_ids, batch.attention) if states is None else states[number]
        state, _ = model.run_layers(shard.layers, state, pool, batch.attention)
        results.append(state)
        if shard.is_last:
            logits.append(model.logits(state, torch.arange(len(batch.token_ids))))
    return results, logits


def logits_of(
    checkpoint: Checkpoint,
    placement: ModelPlacement,
    kernels: Callable[[], Kernels] = ReferenceKernels,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """Of all tokens of both chunks, by rank 0 of the last stage."""
    config, states = placement.config, None
    batches = chunks_of(prompts_of(config))
    logits: list[Tensor | None] = []
    for layers in placement.stages:

        def run(
            group: ThreadGroup, layers: range = layers, states: list[HiddenState] | None = states
        ) -> tuple[list[HiddenState], list[Tensor | None]]:
            shard = ModelShard(SoleRank() if group.size == 1 else group, layers, config.num_layers)
            model = build_model(config, checkpoint, kernels(), max_positions=64, device=CPU, shard=shard)
            copies = states and [copied(each) for each in states]
            return run_stage(model, batches, copies, kv_dtype or checkpoint.dtype)

        results = on_ranks(placement.tensor_parallel_size, run)
        states, logits = results[0]
        for other_states, other_logits in results[1:]:
            assert all(each is None for each in other_logits)
            for state, other in zip(states, other_states, strict=True):
                assert torch.equal(state.residual, other.residual), "hidden states are the same on all ranks"
    found = [each for each in logits if each is not None]
    assert len(found) == len(batches)
    return torch.cat(found)


def copied(state: HiddenState) -> HiddenState:
    return HiddenState(state.residual.clone(), None if state.delta is None else state.delta.clone())


def in_chunk_order(tensors: Sequence[Tensor]) -> Tensor:
    firsts = [each[: len(each) // 2] for each in tensors]
    return torch.cat([*firsts, *(each[len(each) // 2 :] for each in tensors)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """Of each architecture a saved model and the logits of transformers."""
    found = {}
    for kind in CONFIGS:
        folder = tmp_path_factory.mktemp(kind)
        expected_model = save_tiny_model(kind, folder)
        prompts = prompts_of(ModelConfig.from_folder(folder))
        with torch.inference_mode():
            found[kind] = folder, in_chunk_order([expected_model(each[None]).logits[0] for each in prompts])
    return found


@pytest.mark.parametrize(("kind", "tensor_parallel_size", "num_stages"), CASES)
def test_logits_on_ranks_equal_those_of_transformers(
    kind: str, tensor_parallel_size: int, num_stages: int, folders: dict[str, tuple[Path, Tensor]]
) -> None:
    folder, expected = folders[kind]
    placement = ModelPlacement.of(ModelConfig.from_folder(folder), tensor_parallel_size, num_stages)
    logits = logits_of(open_checkpoint(folder, dtype=torch.float32), placement)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3", "opt-350m"])
def test_stages_compute_what_the_whole_model_does(kind: str, folders: dict[str, tuple[Path, Tensor]]) -> None:
    folder, _ = folders[kind]
    config, checkpoint = ModelConfig.from_folder(folder), open_checkpoint(folder, dtype=torch.float32)
    whole = logits_of(checkpoint, ModelPlacement.of(config))
    for num_stages in (2, 3):
        assert torch.equal(logits_of(checkpoint, ModelPlacement.of(config, 1, num_stages)), whole)


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 1) for kind in CONFIGS), ("llama", 2), ("llama", 6), ("opt", 3)]
)
def test_the_cpu_kernels_take_parts_of_any_size(
    kind: str, size: int, folders: dict[str, tuple[Path, Tensor]]
) -> None:
    folder, expected = folders[kind]
    placement = ModelPlacement.of(ModelConfig.from_folder(folder), size)
    logits = logits_of(open_checkpoint(folder, dtype=torch.float32), placement, CpuKernels)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("kind", "size"), [("llama-biased", 2), ("qwen3", 6), ("opt-350m", 3)])
def test_bfloat16_on_ranks_is_as_near_as_in_one_process(
    kind: str, size: int, folders: dict[str, tuple[Path, Tensor]]
) -> None:
    folder, expected = folders[kind]
    config, checkpoint = ModelConfig.from_folder(folder), open_checkpoint(folder, dtype=torch.bfloat16)
    whole, on_ranks = (
        (logits_of(checkpoint, ModelPlacement.of(config, each), CpuKernels).float() - expected).norm()
        for each in (1, size)
    )
    assert on_ranks < 2 * whole < 0.1 * expected.norm()


@pytest.mark.parametrize(("kind", "size"), [("llama-biased", 2), ("qwen3", 1), ("mistral", 2), ("opt", 3)])
def test_logits_with_kv_of_8_bits_are_close(
    kind: str, size: int, folders: dict[str, tuple[Path, Tensor]]
) -> None:
    folder, expected = folders[kind]
    placement = ModelPlacement.of(ModelConfig.from_folder(folder), size)
    checkpoint = open_checkpoint(folder, dtype=torch.float32)
    logits = logits_of(checkpoint, placement, CpuKernels, torch.int8)
    assert 1e-4 * expected.norm() < (logits - expected).norm() < 0.02 * expected.norm()
    reference = logits_of(checkpoint, placement, ReferenceKernels, torch.int8)
    assert (logits - reference).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_rank_reads_and_holds_its_part_only(kind: str, folders: dict[str, tuple[Path, Tensor]]) -> None:
    folder, _ = folders[kind]
    config = ModelConfig.from_folder(folder)
    size = 3 if "opt" in kind else 6
    placement = ModelPlacement.of(config, size, 2)
    read_by_all: Counter[str] = Counter()
    num_stored: dict[str, int] = {}
    for rank in range(placement.num_ranks):
        sizes = placement.sizes(rank)
        checkpoint = CountingCheckpoint(open_checkpoint(folder, dtype=torch.float32))
        model = build(checkpoint, sizes)
        for layer in model.layers.values():
            assert sum(part.nbytes for part in layer.memory()) == 4 * sizes.layer_parameters
        num_tables = sizes.is_first + (sizes.is_last and not (sizes.is_first and config.tie_word_embeddings))
        padding = num_tables * (sizes.vocabulary_rows - sizes.vocabulary.length) * config.embedding_size
        held = len(sizes.layers) * sizes.layer_parameters + sizes.table_parameters + sizes.other_parameters
        assert checkpoint.num_read.total() == held - padding
        for name in filter(is_divided, checkpoint.num_read):
            is_kv = "k_proj" in name or "v_proj" in name
            num_parts = min(size, config.num_kv_heads) if is_kv else size
            assert checkpoint.num_read[name] * num_parts < 1.1 * checkpoint.num_stored[name], name
        read_by_all += checkpoint.num_read
        num_stored |= checkpoint.num_stored
    for name in num_stored:
        assert read_by_all[name] >= num_stored[name], name


def is_divided(name: str) -> bool:
    """A matrix that no rank has all of."""
    whole = ("norm", "bias", "embed_positions", "project_in", "project_out")
    return not any(part in name for part in whole)


def build(checkpoint: Checkpoint, sizes: ShardSizes) -> DecoderModel:
    """The part of a rank that loads without the others."""
    group = ThreadGroup(sizes.rank, Exchange(sizes.size))
    shard = ModelShard(group, sizes.layers, sizes.config.num_layers)
    return build_model(
        sizes.config, checkpoint, ReferenceKernels(), max_positions=64, device=CPU, shard=shard
    )


def test_a_part_of_a_matrix_keeps_no_more_memory(folders: dict[str, tuple[Path, Tensor]]) -> None:
    folder, _ = folders["llama"]
    checkpoint = open_checkpoint(folder, dtype=torch.float32)
    name, shape = "model.layers.0.mlp.down_proj.weight", (48, 80)
    whole, part = checkpoint.get(name, shape), checkpoint.get(name, shape, Part(1, 40, 60))
    assert torch.equal(part, whole[:, 40:60])
    assert part.untyped_storage().nbytes() == part.nbytes


def test_dummy_weights_are_parts_of_the_same_tensors(tmp_path: Path) -> None:
    save_tiny_llama_config(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    checkpoint = open_checkpoint(tmp_path, dtype=torch.float32, load_format="dummy", seed=5)
    whole = logits_of(checkpoint, ModelPlacement.of(config))
    torch.testing.assert_close(logits_of(checkpoint, ModelPlacement.of(config, 2, 2)), whole)
