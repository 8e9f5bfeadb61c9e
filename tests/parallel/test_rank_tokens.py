"""Tokens of a model on several ranks are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.request import Request
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.executor import Executor
from tests.builders import make_request
from tests.execution.tiny import model_fixture, tiny_config
from tests.models.tiny import save_tiny_model
from tests.parallel.rank_threads import RankThreads, Sizes, load_tiny

LAYOUTS = [
    Sizes(2, 2),
    *(pytest.param(each, marks=pytest.mark.slow) for each in (Sizes(tensor=2), Sizes(pipeline=2))),
]
# What ranks divide differently; logits of all architectures on ranks: tests/models/test_shards.py.
KINDS = ["llama", "llama-biased", "opt", "opt-350m", "qwen3"]
SHAPES = [(21, 9), (5, 12), (40, 6), (1, 10)]


def requests() -> list[Request]:
    """Greedy and sampled ones, with penalties; the third begins with a cached prefix of the first."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 190, (length,), generator=generator).tolist() for length, _ in SHAPES]
    prompts[2][:16] = prompts[0][:16]
    sampling = [
        {},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 2},
        {"frequency_penalty": 0.7, "min_tokens": 3},
        {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5},
    ]
    return [
        make_request(
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            request_id=f"r{index}",
            ignore_eos=True,
            **sampling[index],  # type: ignore[arg-type]
        )
        for index, (prompt, (_, max_tokens)) in enumerate(zip(prompts, SHAPES, strict=True))
    ]


def tokens(executor: Executor) -> list[list[int]]:
    """Chunks of prompts beside decodes; one request begins after the others."""
    engine = Engine(
        SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8, prefix_caching=True),
        executor,
        VirtualClock(),
    )
    first, second, third, fourth = all_of_them = requests()
    for request in (first, second, fourth):
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.add(third)
    while engine.has_unfinished:
        engine.step()
    engine.step()
    assert third.num_cached_tokens == 16
    return [list(request.output_token_ids) for request in all_of_them]


model_dir = model_fixture(*KINDS)


def tokens_of_one_process(model_dir: Path, kv_dtype: Literal["auto", "int8"] = "auto") -> list[list[int]]:
    return tokens(create_torch_executor(tiny_config(model_dir, kv_dtype=kv_dtype)))


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    return tokens_of_one_process(model_dir)


@pytest.fixture(params=LAYOUTS, ids=str)
def ranks(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RankThreads]:
    threads = RankThreads(request.param, load_tiny(model_dir))
    yield threads
    threads.close()


def test_tokens_are_those_of_one_process(ranks: RankThreads, expected: list[list[int]]) -> None:
    assert len({tuple(each) for each in expected}) == len(SHAPES)
    assert tokens(ranks) == expected
    assert all(rank._states == {} for rank in ranks.ranks)


def test_tokens_with_kv_of_8_bits_are_those_of_one_process(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    ranks = RankThreads(Sizes(2, 2), load_tiny(tmp_path, kv_dtype="int8"))
    try:
        assert tokens(ranks) == tokens_of_one_process(tmp_path, "int8") != tokens_of_one_process(tmp_path)
    finally:
        ranks.close()
