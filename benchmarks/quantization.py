"""What weights and KV of 4 and 8 bits cost: the perplexity of a text, beside that of both in --dtype.

The text is cut into pieces of --length tokens, each scored apart. Prints a table, and one JSON object as the
last line; the exit status is 1 if a perplexity is further from that of `none` than its goal: 0.1 % for
`auto`, 1 % for `int8`, 3 % for `int4`, 0.5 % for KV in int8.

    quantization.py TEXT_FILE
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from machine_limits import processor_name

from backfill import LLM, SamplingParams
from backfill.models.resolve import DEFAULT_MODEL

KV = "KV int8"
GOALS = {"auto": 0.001, "int8": 0.01, "int4": 0.03, KV: 0.005}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--pieces", type=int, default=32)
    args = parser.parse_args()
    found = {each: perplexity(args, each) for each in ("none", *GOALS)}
    changes = {each: found[each] / found["none"] - 1 for each in GOALS}
    print(f"{processor_name()}, {args.model} in {args.dtype}, {args.pieces} pieces of {args.length} tokens")
    print(f"none    perplexity {found['none']:.4f}")
    for each, change in changes.items():
        print(f"{each:7} perplexity {found[each]:.4f}, {change:+.3%} (goal: within {GOALS[each]:.1%})")
    result = {"benchmark": "quantization", "date": time.strftime("%Y-%m-%d"), "model": args.model}
    print(json.dumps(result | {"dtype": args.dtype, "perplexity": found, "changes": changes}))
    if any(abs(change) > GOALS[each] for each, change in changes.items()):
        raise SystemExit(1)


def perplexity(args: argparse.Namespace, kept: str) -> float:
    """Args: kept: `quantization` of weights, or KV."""
    quantized = {"kv_dtype": "int8"} if kept == KV else {"quantization": kept}
    options = {"dtype": args.dtype, "quantization": "none", "prefix_caching": False} | quantized
    with LLM(args.model, **options) as llm:
        tokens = llm.get_tokenizer().encode(args.text.read_text(encoding="utf-8"))
        pieces = [tokens[start : start + args.length] for start in range(0, len(tokens), args.length)]
        prompts = [{"prompt_token_ids": piece} for piece in pieces[: args.pieces]]
        outputs = llm.generate(prompts, SamplingParams(prompt_logprobs=0, max_tokens=1), use_tqdm=False)
    total, count = 0.0, 0
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token, scores in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert scores is not None
            total -= scores[token].logprob
            count += 1
    return math.exp(total / count)


if __name__ == "__main__":
    main()
