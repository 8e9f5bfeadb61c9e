"""Times the engine alone: a batch, one stream, a first token."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor

_LEAST_TOKEN_ID = 1000  # below lie special tokens


def measure(
    config: EngineConfig,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    stream_len: int,
    seed: int,
    first_token_samples: int = 1,
) -> dict[str, float | list[float]]:
    """Run the batch and the stream once after a short warm-up, then ``first_token_samples`` prompts.

    Returns: ``start_s`` (loading), ``total_tok_s``, ``output_tok_s``, ``stream_tok_s``,
        ``first_token_samples_s`` in order of measurement, and their median ``first_token_s``.
    Raises: ConfigError when a request would not fit the model's context.
    """
    started_at_s = time.perf_counter()
    runner = _Runner(config, seed)
    start_s = time.perf_counter() - started_at_s
    runner.check_fits(input_len, max(output_len, stream_len))
    prompts = [runner.prompt(input_len) for _ in range(num_prompts)]
    runner.run(prompts[:2], 8)
    batch_s = runner.run(prompts, output_len)
    stream_s = runner.run([runner.prompt(input_len)], stream_len)
    first_s = [runner.run([runner.prompt(input_len)], 1) for _ in range(first_token_samples)]
    return {
        "start_s": start_s,
        "total_tok_s": num_prompts * (input_len + output_len) / batch_s,
        "output_tok_s": num_prompts * output_len / batch_s,
        "stream_tok_s": stream_len / stream_s,
        "first_token_s": statistics.median(first_s),
        "first_token_samples_s": first_s,
    }


class _Runner:
    """One executor, and a new engine on it for each run."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self._executor = create_torch_executor(config)
        self._config = config
        self._random = random.Random(seed)

    def check_fits(self, input_len: int, output_len: int) -> None:
        limit = self._executor.info.max_model_len
        if input_len + output_len > limit:
            raise ConfigError(
                f"`input_len` and output tokens together must be at most {limit}, "
                f"got {input_len + output_len}."
            )

    def prompt(self, num_tokens: int) -> list[int]:
        vocab_size = self._executor.info.vocab_size
        least = min(_LEAST_TOKEN_ID, vocab_size - 1)
        return [self._random.randrange(least, vocab_size) for _ in range(num_tokens)]

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Seconds until every prompt has ``num_tokens`` greedy tokens."""
        engine = Engine(self._config.scheduler, self._executor, WallClock())
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add(Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling))
        started_at_s = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        elapsed_s = time.perf_counter() - started_at_s
        engine.step()  # lets the executor drop the requests that ended
        return elapsed_s
