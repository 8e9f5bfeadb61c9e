"""The work of peers.py on another engine: a batch, one stream, first tokens; prints one JSON line.

It runs in the engine's own environment, and imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], None]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--stream-len", type=int, default=256)
    parser.add_argument("--first-token-samples", type=int, default=5)
    return parser


def measure(engine: str, args: argparse.Namespace, vocab_size: int, generate: Generate) -> None:
    """Args: generate: returns when each of the prompts has so many more tokens."""
    chooser = random.Random(0)

    def seconds(num_prompts: int, output_len: int) -> float:
        prompts = [
            [chooser.randrange(1000, vocab_size) for _ in range(args.input_len)] for _ in range(num_prompts)
        ]
        started_at_s = time.perf_counter()
        generate(prompts, output_len)
        return time.perf_counter() - started_at_s

    seconds(2, 8)
    batch_s = seconds(args.num_prompts, args.output_len)
    seconds(1, 8)
    stream_s = seconds(1, args.stream_len)
    first_s = [seconds(1, 1) for _ in range(args.first_token_samples)]
    figures = {
        "batch_tok_s": args.num_prompts * (args.input_len + args.output_len) / batch_s,
        "stream_tok_s": args.stream_len / stream_s,
        "first_token_s": statistics.median(first_s),
        "first_token_samples_s": first_s,
    }
    print(json.dumps({"engine": engine, **figures}))
