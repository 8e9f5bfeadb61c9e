"""Orders of offline lines: ``run-batch`` on three pools in every order, one after another; and ``LLM``.

``few-shot`` is an evaluation: 40 prefixes of five examples, a short question and two tokens of answer, so a
perfect cache saves 0.85 of all tokens. ``shared`` shares 0.35: system prompts before short chats, beside
stories with long outputs. ``none`` shares nothing and has the same lengths of output. ``documents`` has eight
questions about each of many documents, beside stories. All lines are of known length. Each run is a process
of its own; its time is that of the summary, which includes loading the model. ``llm`` and ``llm-as-given``
are one call of ``LLM.generate``, whose time is the call's alone: in the order that the library chooses, and
in that of the prompts.

The limit is what FLOPs and bytes alone take on this machine: every token through the layers at the rate of
large bf16 products, sampled tokens through the embedding, and the KV that decode steps read at the rate of
reading memory. One after the other is the limit of this engine; beside each other that of any.

Usage: offline_pools.py [--lines 2000] [--rounds 3] [--pools few-shot,shared,none] [--kv-gib 1]
       [--orders fcfs,random,dfs,batchllm,blend] [--no-uncached]. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from machine_limits import measure_limits, processor_name, read_parameters

from backfill import LLM, RequestOutput, SamplingParams
from backfill.llm.order import CallOrder
from backfill.llm.request import PreparedRequest
from backfill.models.config import ModelConfig
from backfill.models.resolve import resolve_model

MODEL = "smollm2-135m-instruct"
ORDERS = "fcfs", "random", "dfs", "batchllm", "blend"
UNCACHED = "fcfs without prefix caching"
LIBRARY, LIBRARY_AS_GIVEN = "llm", "llm-as-given"
# Of one token each after a space.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city
"""
WORDS = tuple(_WORDS.split())


class Line(NamedTuple):
    """A prompt's shared beginning and its own end, in words, and the length of its output."""

    prefix: str
    own: str
    output_tokens: int


def few_shot(count: int, rng: random.Random) -> list[Line]:
    examples = [text(300, rng) for _ in range(40)]
    return [Line(rng.choice(examples), text(rng.randint(24, 56), rng), 2) for _ in range(count)]


def shared(count: int, rng: random.Random) -> list[Line]:
    system_prompts = [text(81, rng) for _ in range(25)]
    chats = [
        Line(rng.choice(system_prompts), text(rng.randint(40, 110), rng), rng.randint(4, 20))
        for _ in range(count * 3 // 4)
    ]
    return chats + [Line("", text(20, rng), length) for length in long_outputs(count - len(chats), rng)]


def documents(count: int, rng: random.Random) -> list[Line]:
    """Eight questions about each document, and stories with long outputs; far more than a KV cache holds."""
    num_questions = count * 3 // 4
    texts = [text(300, rng) for _ in range(-(-num_questions // 8))]
    questions = [
        Line(texts[number // 8], text(rng.randint(20, 60), rng), rng.randint(4, 20))
        for number in range(num_questions)
    ]
    return questions + [Line("", text(20, rng), each) for each in long_outputs(count - num_questions, rng)]


def none(count: int, rng: random.Random) -> list[Line]:
    chats = [Line("", text(rng.randint(40, 160), rng), rng.randint(4, 20)) for _ in range(count * 3 // 4)]
    return chats + [Line("", text(20, rng), length) for length in long_outputs(count - len(chats), rng)]


def long_outputs(count: int, rng: random.Random) -> list[int]:
    return [rng.randint(60, 240) for _ in range(count)]


def text(num_words: int, rng: random.Random) -> str:
    return "".join(" " + rng.choice(WORDS) for _ in range(num_words))


POOLS: dict[str, Callable[[int, random.Random], list[Line]]] = {
    "few-shot": few_shot,
    "shared": shared,
    "none": none,
    "documents": documents,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pools", default="few-shot,shared,none", help=f"some of {', '.join(POOLS)}")
    parser.add_argument("--orders", default=",".join(ORDERS), help=f"or {LIBRARY}, {LIBRARY_AS_GIVEN}")
    parser.add_argument("--kv-gib", type=float, default=1.0)
    parser.add_argument(
        "--no-uncached", action="store_true", help="leave out few-shot without prefix caching"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    orders = args.orders.split(",")
    machine = measure_limits()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.pools.split(","):
            lines = POOLS[name](args.lines, random.Random(args.seed))
            random.Random(args.seed).shuffle(lines)
            variants = [*orders, UNCACHED] if name == "few-shot" and not args.no_uncached else orders
            runs = measure(Path(folder), lines, variants, args)
            result[name] = figures_of(runs, lines, machine)
            print_table(name, result[name])
    print(json.dumps({"processor": processor_name(), "machine": machine, **vars(args), "pools": result}))


def measure(
    folder: Path, lines: Sequence[Line], variants: Sequence[str], args: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Summaries of the runs; each round begins with another variant."""
    input_file = folder / "in.jsonl"
    input_file.write_text("".join(json.dumps(body_of(*each)) + "\n" for each in enumerate(lines)))
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for turn in range(args.rounds):
        first = turn % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            if variant in (LIBRARY, LIBRARY_AS_GIVEN):
                runs[variant].append(call_library(input_file, variant, args.kv_gib))
            else:
                runs[variant].append(run_once(input_file, folder / "out.jsonl", variant, args.kv_gib))
            print(f"{variant}: {runs[variant][-1]['duration_s']:.1f} s", file=sys.stderr, flush=True)
    return runs


def body_of(number: int, line: Line) -> dict[str, Any]:
    return {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/completions",
        "body": {
            "model": MODEL,
            "prompt": line.prefix + line.own,
            "max_tokens": line.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        },
    }


class AsGiven:
    """In place of a ``CallOrder``."""

    def __init__(self, requests: Sequence[PreparedRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[tuple[int, PreparedRequest]]:
        return enumerate(self._requests)

    def note_end(self, index: int, output: RequestOutput) -> None:
        """Lengths change nothing."""


def call_library(input_file: Path, variant: str, kv_gib: float) -> dict[str, float]:
    bodies = [json.loads(line)["body"] for line in input_file.read_text().splitlines()]
    params = [
        SamplingParams(max_tokens=each["max_tokens"], ignore_eos=True, temperature=0) for each in bodies
    ]
    order = CallOrder.on if variant == LIBRARY else lambda _, requests: AsGiven(requests)
    with LLM(MODEL, kv_gib=kv_gib) as llm, mock.patch.object(CallOrder, "on", order):
        begun_s = time.perf_counter()
        outputs = llm.generate([each["prompt"] for each in bodies], params, use_tqdm=False)
        duration_s = time.perf_counter() - begun_s
    return {
        "duration_s": duration_s,
        "input_tokens": sum(len(each.prompt_token_ids) for each in outputs),
        "output_tokens": sum(len(each.outputs[0].token_ids) for each in outputs),
        "cached_tokens": sum(each.num_cached_tokens or 0 for each in outputs),
    }


def run_once(input_file: Path, output_file: Path, variant: str, kv_gib: float) -> dict[str, float]:
    options = ["--kv-gib", str(kv_gib), *(["--no-prefix-caching"] if variant == UNCACHED else [])]
    order = "fcfs" if variant == UNCACHED else variant
    command = [sys.executable, "-m", "backfill", "run-batch", "-i", str(input_file), "-o", str(output_file)]
    try:
        done = subprocess.run(
            [*command, "--order", order, "--json", *options], check=True, stdout=subprocess.PIPE, text=True
        )
    finally:
        output_file.unlink(missing_ok=True)
    summary: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return summary


def figures_of(
    runs: dict[str, list[dict[str, float]]], lines: Sequence[Line], machine: dict[str, float]
) -> dict[str, Any]:
    some = next(iter(runs.values()))[0]
    num_tokens = some["input_tokens"] + some["output_tokens"]
    medians = {
        variant: statistics.median(run["duration_s"] for run in each) for variant, each in runs.items()
    }
    cached = {
        variant: statistics.median(run["cached_tokens"] for run in each) for variant, each in runs.items()
    }
    best_cached = max(cached.values())
    compute_s, memory_s = limits_s(some, best_cached, lines, machine)
    return {
        "num_tokens": num_tokens,
        "sharing": best_cached / num_tokens,
        "compute_s": compute_s,
        "memory_s": memory_s,
        "orders": {
            variant: {
                "seconds": medians[variant],
                "all_seconds": [run["duration_s"] for run in runs[variant]],
                "tokens_per_s": num_tokens / medians[variant],
                "cached_tokens": cached[variant],
            }
            for variant in runs
        },
    }


def limits_s(
    work: dict[str, float], num_cached_tokens: float, lines: Sequence[Line], machine: dict[str, float]
) -> tuple[float, float]:
    """Seconds of matrix products, and of reading the KV of decode steps, at the machine's rates."""
    config = ModelConfig.from_folder(resolve_model(MODEL))
    embedding = config.vocab_size * config.hidden_size
    computed = work["input_tokens"] - num_cached_tokens + work["output_tokens"] - len(lines)
    flops = 2 * (computed * (read_parameters(config) - embedding) + work["output_tokens"] * embedding)
    mean_prompt = work["input_tokens"] / len(lines)
    reads = sum(
        (line.output_tokens - 1) * (prompt_words(line) + line.output_tokens / 2) for line in lines
    ) * (mean_prompt * len(lines) / sum(map(prompt_words, lines)))
    kv_bytes = config.kv_bytes_per_token(2) * reads
    return flops / machine["matrix_gflop_s"] / 1e9, kv_bytes / machine["read_gb_s"] / 1e9


def prompt_words(line: Line) -> int:
    return (line.prefix + line.own).count(" ")


def print_table(name: str, figures: dict[str, Any]) -> None:
    compute_s, memory_s = figures["compute_s"], figures["memory_s"]
    print(
        f"{name}: {figures['num_tokens']:.0f} tokens, {figures['sharing']:.2f} of them from the cache; "
        f"limit {compute_s + memory_s:.1f} s, {max(compute_s, memory_s):.1f} s overlapped"
    )
    orders = figures["orders"]
    best_s = min(each["seconds"] for each in orders.values())
    for order, each in orders.items():
        print(
            f"  {order:28s} {each['seconds']:7.1f} s {each['tokens_per_s']:8.0f} tokens/s"
            f" {best_s / each['seconds']:6.3f} of the best, {each['cached_tokens']:8.0f} tokens cached"
        )


if __name__ == "__main__":
    main()
