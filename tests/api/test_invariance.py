"""What else is served changes no answer: the small model, and the default one in bfloat16, beside a flood."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from tests.api.servers import RunningServer

# Lengths on both sides of blocks, of chunks of keys (128), and of rows that a kernel computes together.
PROMPTS = [[(1009 * index + 31 * at) % 40000 + 100 for at in range(11 + 59 * index)] for index in range(3)]
NUM_TOKENS = 8
NUM_FLOODING = 4
_salts = itertools.count()


def complete(server: RunningServer, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """A choice of one request. Its salt is its own, so that nothing is found in the prefix cache."""
    fields |= {"return_token_ids": True, "cache_salt": f"invariance {next(_salts)}"}
    choice: dict[str, Any] = server.complete(prompt, max_tokens=NUM_TOKENS, **fields)["choices"][0]
    return choice


@pytest.mark.parametrize("name", ["server", pytest.param("default_server", marks=pytest.mark.slow)])
def test_answers_beside_a_flood_are_those_alone(name: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(name)
    greedy, seeded = {"temperature": 0, "logprobs": 1}, {"temperature": 0.9, "seed": 5, "logprobs": 1}
    asked = [(prompt, fields) for prompt in PROMPTS for fields in (greedy, seeded)]
    alone = [complete(server, prompt, **fields) for prompt, fields in asked]
    is_over = Event()

    def flood(index: int) -> None:
        for turn in itertools.count():
            if is_over.is_set():
                return
            length = 1 + (97 * index + 61 * turn) % 150
            complete(
                server, [(7 * index + 13 * turn + at) % 40000 for at in range(length)], service_tier="flex"
            )

    with ThreadPoolExecutor(NUM_FLOODING + 4) as pool:
        flooding = [pool.submit(flood, index) for index in range(NUM_FLOODING)]
        try:
            beside = list(pool.map(lambda each: complete(server, each[0], **each[1]), asked))
        finally:
            is_over.set()
        for each in flooding:
            each.result()
    assert beside == alone  # tokens, and the log probabilities to the last digit
