"""Tokens of the real default model are transformers'; however they are batched, cut or preempted, the same.

The latter is held with a small random model: what changes a batch's shape does not look at the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from backfill.core.clock import WallClock
from backfill.core.config import Quantization, SchedulerConfig
from backfill.core.request import RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.generation.tokenizer import Tokenizer
from tests.builders import make_request
from tests.engine.interruptions import WithBlocks
from tests.execution.tiny import tiny_config
from tests.integrity import check_scheduler
from tests.models.gguf.builders import transformers_model

NUM_NEW_TOKENS = 20
# Of the real model, in blocks of 8: each output reaches into another block too.
NUM_REAL_TOKENS = 9
# A step takes as long for one prompt as for many; these reach into the next block.
NUM_TOKENS_ALONE = 10
# Prompts in one pass through transformers' model.
NUM_COMPARED_AT_ONCE = 6
TOPICS = [
    "the sea", "a train", "winter", "an old clock", "bread", "the moon", "a small robot", "gravity", "chess",
]  # fmt: skip
SHAPES = ["Write one sentence about {}.", "{} is", "def describe():\n    # {}\n    return"]


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(default_model)
    texts = [tokenizer.render_chat([{"role": "user", "content": SHAPES[0].format(t)}]) for t in TOPICS]
    chats = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    plain = [tokenizer.encode(shape.format(topic)) for topic in TOPICS for shape in SHAPES[1:]]
    return chats + plain


def create_executor(model: Path, kv_gib: float, **options: Any) -> TorchExecutor:
    """With small blocks, so that requests outgrow them often."""
    return create_torch_executor(tiny_config(model, kv_gib=kv_gib, max_model_len=512, **options))


@pytest.fixture(
    scope="module",
    params=[("float32", "none", "auto"), ("bfloat16", "none", "auto"), ("bfloat16", "int4", "int8")],
    ids="-".join,
)
def executor(small_model: Path, request: pytest.FixtureRequest) -> TorchExecutor:
    dtype, quantization, kv_dtype = request.param
    # For all prompts at once, and little more: an integrity check looks at every block.
    kv_gib = 1 / 256 if dtype == "float32" else 1 / 512 if kv_dtype == "auto" else 1 / 800
    return create_executor(small_model, kv_gib, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype)


def generate(
    executor: TorchExecutor,
    prompts: Sequence[list[int]],
    num_blocks: int | None = None,
    num_new_tokens: int = NUM_NEW_TOKENS,
    *,
    prefix_caching: bool = True,
    **limits: int,
) -> tuple[list[list[int]], Engine]:
    """Greedy outputs of all prompts through one engine, with an integrity check after every step."""
    config = SchedulerConfig(prefix_caching=prefix_caching, **limits)
    engine = Engine(config, WithBlocks(executor, num_blocks or executor.info.num_blocks), WallClock())
    requests = [
        make_request(prompt_token_ids=prompt, max_tokens=num_new_tokens, request_id=f"r{index}")
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        assert engine.add(request) is None
    while engine.has_unfinished:
        engine.step()
        check_scheduler(engine.scheduler)
    engine.step()  # tells the executor to drop the last requests
    assert engine.scheduler.kv.counts.referenced == 0
    assert executor._states == {}
    assert prefix_caching or num_hit_tokens(engine) == 0
    return [request.output_token_ids for request in requests], engine


def num_hit_tokens(engine: Engine) -> int:
    """The chats begin with the same tokens of the template."""
    return engine.scheduler.counters[ServiceClass.ONLINE].num_prefix_hit_tokens


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> Any:
    """The default model of transformers."""
    return transformers_model(default_model)


def compared_with_transformers(
    default_model: Path, theirs: Any, prompts: list[list[int]], quantization: Quantization
) -> list[tuple[list[int], list[int]]]:
    """Of each prompt its greedy output, and transformers' choice after each of the output's prefixes."""
    executor = create_executor(default_model, 0.25, quantization=quantization)
    # Chunks of prompts beside decodes, and more prompts than one batch holds.
    limits = {"max_num_seqs": 4, "max_prefill_chunk_tokens": 16}
    outputs, _ = generate(executor, prompts, num_new_tokens=NUM_REAL_TOKENS, **limits)
    pairs = []
    for first in range(0, len(prompts), NUM_COMPARED_AT_ONCE):
        compared = range(first, min(first + NUM_COMPARED_AT_ONCE, len(prompts)))
        prefixes = [prompts[index] + outputs[index][:-1] for index in compared]
        longest = max(map(len, prefixes))
        # Attention is causal: what is added on the right changes nothing before it.
        logits = theirs(torch.tensor([each + [0] * (longest - len(each)) for each in prefixes])).logits
        for index, prefix, choices in zip(compared, prefixes, logits.argmax(-1).tolist(), strict=True):
            output = outputs[index]
            assert len(output) == NUM_REAL_TOKENS or output[-1] in executor.info.end_token_ids
            pairs.append((output, choices[len(prompts[index]) - 1 : len(prefix)]))
    return pairs


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(default_model: Path, theirs: Any, prompts: list[list[int]]) -> None:
    """Of a fifth of the prompts, of all shapes."""
    # One pass gives its choice after every prefix: if each is ours, its greedy output is ours.
    for output, choices in compared_with_transformers(default_model, theirs, prompts[::5], "none"):
        assert output == choices


@pytest.mark.slow  # of one layer: tests/kernels/test_quantized.py
@torch.inference_mode()
def test_rows_of_8_bits_change_few_choices(
    default_model: Path, theirs: Any, prompts: list[list[int]]
) -> None:
    """Where linear layers of codes round them (docs/kernels.md)."""
    pairs = compared_with_transformers(default_model, theirs, prompts[1::2], "auto")
    equal = [
        ours == choice for output, choices in pairs for ours, choice in zip(output, choices, strict=True)
    ]
    assert len(equal) > 100
    assert sum(equal) >= 0.9 * len(equal)


@pytest.fixture(scope="module")
def expected(executor: TorchExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """Outputs of all prompts in one batch, each computed whole."""
    outputs, _ = generate(executor, prompts, prefix_caching=False, max_num_seqs=64)
    assert len({tuple(output) for output in outputs}) == len(outputs), "tokens depend on the prompt"
    return outputs


@pytest.mark.parametrize(
    ("limits", "prefix_caching"),
    [
        pytest.param({"max_num_seqs": 12, "max_num_batched_tokens": 19}, True, id="chunked"),
        pytest.param({"max_num_seqs": 24, "max_prefill_chunk_tokens": 7}, False, id="small-chunks"),
    ],
)
def test_tokens_do_not_depend_on_the_chunks(
    executor: TorchExecutor,
    prompts: list[list[int]],
    expected: list[list[int]],
    limits: dict[str, int],
    prefix_caching: bool,
) -> None:
    outputs, engine = generate(executor, prompts, prefix_caching=prefix_caching, **limits)
    assert outputs == expected
    assert (num_hit_tokens(engine) > 0) == prefix_caching


def test_tokens_of_a_prompt_alone(
    executor: TorchExecutor, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A third of them, of all shapes."""
    outputs, _ = generate(executor, prompts[::3], num_new_tokens=NUM_TOKENS_ALONE, max_num_seqs=1)
    assert outputs == [output[:NUM_TOKENS_ALONE] for output in expected[::3]]


@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_preempted_requests_yield_the_same_tokens(
    executor: TorchExecutor, prompts: list[list[int]], expected: list[list[int]], prefix_caching: bool
) -> None:
    outputs, engine = generate(
        executor, prompts, num_blocks=32, prefix_caching=prefix_caching, max_num_seqs=16
    )
    assert engine.scheduler.counters[ServiceClass.ONLINE].num_preemptions > 5
    assert (num_hit_tokens(engine) > 0) == prefix_caching
    assert outputs == expected


def test_seeds_give_the_same_tokens_alone_and_in_a_batch(
    executor: TorchExecutor, prompts: list[list[int]]
) -> None:
    def run(max_num_seqs: int) -> list[list[int]]:
        engine = Engine(SchedulerConfig(max_num_seqs=max_num_seqs), executor, WallClock())
        requests = []
        for index, prompt in enumerate(prompts[:12]):
            request = make_request(prompt_token_ids=prompt, max_tokens=5, request_id=f"r{index}")
            request.sampling = SamplingParams(
                max_tokens=5, temperature=0.8, top_p=0.9, top_k=40 * (index % 2), seed=index
            )
            engine.add(request)
            requests.append(request)
        while engine.has_unfinished:
            engine.step()
        engine.step()
        return [request.output_token_ids for request in requests]

    assert run(12) == run(1)


def test_an_abort_in_the_middle_leaves_the_others_alone(
    executor: TorchExecutor, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = Engine(SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24), executor, WallClock())
    requests = [
        make_request(prompt_token_ids=prompt, max_tokens=NUM_NEW_TOKENS, request_id=f"r{index}")
        for index, prompt in enumerate(prompts[:8])
    ]
    for request in requests:
        engine.add(request)
    for number in range(8):
        engine.step()
        if number % 2:
            engine.abort([RequestId(f"r{number}")])
            check_scheduler(engine.scheduler)
    while engine.has_unfinished:
        engine.step()
    engine.step()
    assert executor._states == {}
    assert [r.output_token_ids for r in requests[::2]] == expected[:8:2]
