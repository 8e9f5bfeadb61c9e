from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from backfill.bench.arrivals import ArrivalConfig
from backfill.bench.dataset import DatasetConfig, build_requests
from backfill.core.errors import ConfigError

RATE = ArrivalConfig(request_rate=2.0)
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,6\n1,50,6\n4,7,8\n"


class WordTokenizer:
    """A token a word; two equal words in a row are one, as merges make of random ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [int(word) for word in text.split()]
        return [token for i, token in enumerate(ids) if i == 0 or token != ids[i - 1]]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_random_requests_are_the_same_for_the_same_seed() -> None:
    config = DatasetConfig(num_prompts=5, input_len=20, random_range_ratio=0.5, random_prefix_len=2)
    first, again = (build_requests(config, RATE) for _ in range(2))
    assert first == again
    assert first[-1].due_at_s == pytest.approx(2.5)
    assert all(request.input_tokens == len(request.prompt) for request in first)
    assert all(12 <= request.input_tokens <= 32 and 64 <= request.output_tokens <= 192 for request in first)
    busier = build_requests(config, ArrivalConfig(request_rate=4.0, burstiness=0.25))
    assert [request.prompt for request in busier] == [request.prompt for request in first]


def test_equal_seeds_give_the_arrivals_of_vllm() -> None:
    """What ``vllm bench serve --seed 3 --request-rate 2 --burstiness 0.5`` draws, one gap at a time."""
    state = np.random.RandomState(3)
    instants = np.cumsum([state.gamma(shape=0.5, scale=1 / (2.0 * 0.5)) for _ in range(20)])
    config = DatasetConfig(num_prompts=20, seed=3)
    requests = build_requests(config, ArrivalConfig(request_rate=2.0, burstiness=0.5))
    assert [request.due_at_s for request in requests] == pytest.approx(instants * (20 / 2.0 / instants[-1]))


def test_chat_prompts_are_text_of_the_length_asked_for() -> None:
    config = DatasetConfig(num_prompts=3, input_len=2000)
    tokenizer = WordTokenizer()
    requests = build_requests(config, RATE, tokenizer=tokenizer, vocabulary_size=60, as_text=True)
    assert [len(tokenizer.encode(str(request.prompt))) for request in requests] == [2000] * 3
    with pytest.raises(ConfigError, match="`tokenizer`"):
        build_requests(config, RATE, as_text=True)


def test_traces_keep_their_times_or_are_rescaled(tmp_path: Path) -> None:
    path = write(tmp_path, TRACE)
    config = DatasetConfig(dataset_name="trace", dataset_path=path, num_prompts=2, max_total_len=20)
    own = build_requests(config, ArrivalConfig())
    assert [(request.due_at_s, request.input_tokens, request.output_tokens) for request in own] == [
        (0.0, 5, 6),
        (4.0, 7, 8),
    ]
    assert [request.due_at_s for request in build_requests(config, RATE)] == [0.0, 1.0]
    generated = ArrivalConfig(request_rate=2.0, burstiness=math.inf, self_timed=False)
    assert [request.due_at_s for request in build_requests(config, generated)] == [0.5, 1.0]


def test_lengths_without_times_are_sampled(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n")
    config = DatasetConfig(dataset_name="trace", dataset_path=path, num_prompts=50, output_len=3)
    requests = build_requests(config, RATE)
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(5, 3), (7, 3)}


def test_sharegpt_takes_first_turns_that_pass_the_filter(tmp_path: Path) -> None:
    def turns(prompt_len: int, answer_len: int) -> dict[str, object]:
        texts = [" ".join(map(str, range(length))) for length in (prompt_len, answer_len)]
        return {"conversations": [{"value": text} for text in texts]}

    lengths = [(10, 20), (3, 20), (10, 3), (1100, 20), (900, 1200), (30, 40)]
    path = write(tmp_path, json.dumps([turns(*pair) for pair in lengths]), "s.json")
    config = DatasetConfig(dataset_name="sharegpt", dataset_path=path, num_prompts=6)
    requests = build_requests(config, RATE, tokenizer=WordTokenizer())
    assert len(requests) == 6
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(10, 20), (30, 40)}
    with pytest.raises(ConfigError, match="sharegpt needs `tokenizer`"):
        build_requests(config, RATE)


def test_phases_and_ramps_give_the_arrivals() -> None:
    config = DatasetConfig(num_prompts=4)
    phased = ArrivalConfig(burstiness=math.inf, phases="1:2,3:0")
    assert [request.due_at_s for request in build_requests(config, phased)] == pytest.approx(
        [0.5, 1.0, 4.5, 5.0]
    )
    rates = {"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 4.0}
    ramp = ArrivalConfig(burstiness=math.inf, ramp_up_strategy="linear", **rates)
    assert build_requests(config, ramp)[0].due_at_s == 1.0


@pytest.mark.parametrize(
    ("dataset", "arrival", "message"),
    [
        (DatasetConfig(num_prompts=0), RATE, "`num_prompts`"),
        (DatasetConfig(dataset_name="trace"), RATE, "needs `dataset_path`"),
        (DatasetConfig(random_input_len=0), RATE, "`random_input_len`"),
        (DatasetConfig(seed=-1), RATE, "`seed`"),
        (DatasetConfig(), ArrivalConfig(request_rate=-1.0), "`request_rate`"),
        (DatasetConfig(), ArrivalConfig(request_rate=1.0, phases="1:2"), "Only one of"),
        (DatasetConfig(), ArrivalConfig(burstiness=0.0), "`burstiness`"),
    ],
)
def test_out_of_range(dataset: DatasetConfig, arrival: ArrivalConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_requests(dataset, arrival)
