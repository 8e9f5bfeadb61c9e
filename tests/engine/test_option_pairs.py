"""Every option with every other: an engine with both runs, or is refused for the reason in the documents.

Engines that run have more options than two: a few of them have all pairs.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.options import with_options
from backfill.core.request import Request, ServiceClass
from backfill.engine.process import load_engine
from tests.builders import make_request
from tests.models.tiny import save_tiny_model

pytestmark = pytest.mark.slow

Values = Mapping[str, Any]

BLOCK_BYTES = 4 * 2 * 2 * 16 * 16 * 4  # 4 layers, K and V of 2 heads of 16 float32, 16 tokens
NUM_TOKENS = 12  # of an online request

BUS = {"offload_interval": 2, "offload_bus": "BUS", "offload_bus_gib_per_s": 8.0}
# Values of each option. Some need another one, which is given with them.
OPTIONS: Mapping[str, Mapping[str, Values]] = {
    "policy": {name: {"policy": name} for name in ("slo", "conserve", "bros", "fcfs", "online-only")},
    "safepoints": {"off": {"policy": "slo", "safepoints": False}},
    "preemption": {"discard": {"policy": "slo", "preemption": "discard"}},
    "checkpointing": {name: {"checkpointing": name} for name in ("eager", "swap", "lazy", "none")},
    "host_kv_gib": {"0": {"host_kv_gib": 0.0}},
    "kv_restore": {"blocking": {"kv_restore": "blocking", "checkpointing": "swap"}},
    "prefix_caching": {"off": {"prefix_caching": False}},
    "kv_layout": {name: {"kv_layout": name} for name in ("unidirectional", "bidirectional")},
    "kv_dtype": {"int8": {"kv_dtype": "int8"}},
    "quantization": {"int4": {"quantization": "int4"}},
    "block_size": {"8": {"block_size": 8}},
    "num_micro_batches": {"2": {"num_micro_batches": 2}},
    "offload_interval": {"2": {"offload_interval": 2}, "auto": {"offload_interval": "auto"}},
    "min_offload_interval": {"2": {"offload_interval": 3, "min_offload_interval": 2}},
    "offload_bus": {"on": BUS},
    "tensor_parallel_size": {"2": {"tensor_parallel_size": 2, "threads": 4}},
    "pipeline_parallel_size": {"2": {"pipeline_parallel_size": 2, "threads": 4}},
}
# Engines of several processes take seconds to start: pairs with these are built as far as they are refused.
RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
# Values under which tokens are others.
ROUNDING = ("kv_dtype", "quantization")
# Under these, some of what others do does not happen, or other kernels do it.
MASKS = (
    "policy=online-only",
    "checkpointing=none",
    "host_kv_gib=0",
    "prefix_caching=off",
    "kv_dtype=int8",
    "quantization=int4",
)
CHOICES = [f"{option}={name}" for option, values in OPTIONS.items() for name in values]


def pairs() -> Iterator[tuple[str, str]]:
    """Values of two options, each as ``option=value``; not those of ranks alone."""
    for one, other in itertools.combinations(CHOICES, 2):
        first, second = (each.partition("=")[0] for each in (one, other))
        if first != second and first not in RANKS:
            yield one, other


def sets_with(running: Collection[frozenset[str]]) -> Iterator[list[str]]:
    """Choices of which each two are one of these pairs, with every pair in one of the sets.

    Beside a mask only the mask's own pairs count.
    """
    left = dict.fromkeys(running)
    while left:
        chosen = sorted(next(iter(left)))
        masks = [each for each in chosen if each in MASKS]
        for choice in CHOICES:
            new = [frozenset((choice, each)) in left for each in masks or chosen]
            fits = all(frozenset((choice, each)) in running for each in chosen)
            if fits and choice not in MASKS and 2 * sum(new) >= len(new):
                chosen.append(choice)
        yield chosen
        for pair in map(frozenset, itertools.combinations(chosen, 2)):
            if not masks or pair & set(masks):
                left.pop(pair, None)


def values_of(*chosen: str) -> Values | None:
    """All values of the chosen, or None where they give one option two."""
    merged: dict[str, Any] = {}
    for each in chosen:
        option, _, name = each.partition("=")
        for key, value in OPTIONS[option][name].items():
            if merged.setdefault(key, value) != value:
                return None
    return merged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pairs")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 4}
    save_tiny_model("llama", folder / "model", **sizes)
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKFILL_CACHE_ROOT", str(folder / "cache"))
        yield folder
    torch.set_num_threads(num_threads)


def request(index: int, max_tokens: int, service_class: ServiceClass) -> Request:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(3, 190, (20 + 9 * index,), generator=generator).tolist()
    return make_request(
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        request_id=f"r{index}",
        service_class=service_class,
        arrived_at_s=time.monotonic(),
        ignore_eos=True,
    )


def config_of(folder: Path, values: Values) -> EngineConfig:
    config = EngineConfig(
        model_dir=str(folder / "model"),
        device="cpu",
        dtype="float32",
        threads=1,
        kv_gib=24 * BLOCK_BYTES / GIB,
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_prefill_chunk_tokens=32),
    )
    bus = {"offload_bus": str(folder / "bus")} if "offload_bus" in values else {}
    config = with_options(config, {**values, **bus})
    config.validate()
    return config.with_checkpointing()


def serve(config: EngineConfig) -> tuple[list[list[int]], int]:
    """Online requests that come while offline ones fill the pool of 24 blocks.

    Returns: the tokens of the online ones, and how often offline ones were preempted.
    """
    engine = load_engine(config)
    try:
        offline = [request(index, 24, ServiceClass.OFFLINE) for index in range(4)]
        online = [request(index, NUM_TOKENS, ServiceClass.ONLINE) for index in range(4, 8)]
        for each in offline if config.scheduler.policy != "online-only" else ():
            engine.add(each)
        for _ in range(8):
            engine.step()
        for each in online:
            engine.add(each)
        while engine.has_unfinished:
            engine.step()
        return [list(each.output_token_ids) for each in online], sum(each.num_preemptions for each in offline)
    finally:
        engine.executor.close()


@pytest.fixture(scope="module")
def plain_tokens(folder: Path) -> Callable[[Values], list[list[int]]]:
    """What an engine with these values of ``ROUNDING`` and no other options serves."""

    @cache
    def serve_plain(values: frozenset[tuple[str, Any]]) -> list[list[int]]:
        return serve(config_of(folder, dict(values)))[0]

    return lambda values: serve_plain(frozenset(values.items()))


def documented_pairs() -> set[frozenset[str]]:
    """Of the table in the documents, each option as ``option=value``."""
    text = Path(__file__).parents[2].joinpath("docs/architecture.md").read_text()
    table = text.partition("## What excludes what\n")[2].partition("\n## ")[0]
    return {frozenset(row) for row in re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| [^|]+ \|$", table, re.M)}


def test_offline_requests_give_way(folder: Path) -> None:
    assert serve(config_of(folder, {"policy": "slo"}))[1] > 0


def test_two_options_run_together_or_are_refused_as_documented(
    folder: Path, plain_tokens: Callable[[Values], list[list[int]]]
) -> None:
    running, refused = dict[frozenset[str], None](), set[frozenset[str]]()
    for pair in pairs():
        values = values_of(*pair)
        if values is None:  # what one of them needs is another value of what the other needs
            continue
        try:
            config = config_of(folder, values)
        except ConfigError:
            refused.add(frozenset(pair))
            continue
        if config.num_ranks == 1:
            running[frozenset(pair)] = None
    assert refused == documented_pairs()
    for chosen in sets_with(running):
        values = values_of(*chosen)
        assert values is not None
        found, _ = serve(config_of(folder, values))
        rounding = {name: values[name] for name in ROUNDING if name in values}
        assert found == plain_tokens(rounding), chosen
        assert all(len(each) == NUM_TOKENS for each in found), chosen
