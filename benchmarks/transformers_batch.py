"""transformers' own continuous batching on the work of peers.py; prints one JSON line with its figures.

Batch, stream and first tokens are timed from adding the prompts to the last token, prefill included, in the
order of the other engines' scripts and after the same warm-up.

Usage: transformers_batch.py MODEL_DIR [--num-prompts 64] [--input-len 256] [--output-len 128]
           [--stream-len 256] [--first-token-samples 5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

# As large as Backfill's pool in this comparison, about 1 GiB.
POOL = ContinuousBatchingConfig(page_size=16, num_blocks=2900, max_batch_tokens=2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--stream-len", type=int, default=256)
    parser.add_argument("--first-token-samples", type=int, default=5)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        args.model_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    chooser = random.Random(0)

    # A negative id is never drawn, so no token ends a sequence.
    settings = GenerationConfig(max_new_tokens=args.output_len, do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=POOL) as manager:

        def seconds(num_prompts: int, output_len: int) -> float:
            prompts = [
                [chooser.randrange(1000, model.config.vocab_size) for _ in range(args.input_len)]
                for _ in range(num_prompts)
            ]
            started_at_s = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=output_len)
            lengths = []
            while len(lengths) < num_prompts:
                output = manager.get_result(timeout=300)
                if output is None:
                    raise SystemExit("no result within 300 s")
                if output.is_finished():
                    lengths.append(len(output.generated_tokens))
            if lengths != [output_len] * num_prompts:
                raise SystemExit(f"expected {num_prompts} outputs of {output_len} tokens, got {lengths}")
            return time.perf_counter() - started_at_s

        seconds(2, 8)
        batch_s = seconds(args.num_prompts, args.output_len)
        stream_s = seconds(1, args.stream_len)
        first_s = [seconds(1, 1) for _ in range(args.first_token_samples)]
    figures = {
        "batch_tok_s": args.num_prompts * (args.input_len + args.output_len) / batch_s,
        "stream_tok_s": args.stream_len / stream_s,
        "first_token_s": statistics.median(first_s),
        "first_token_samples_s": first_s,
    }
    print(json.dumps({"engine": "transformers", **figures}))


if __name__ == "__main__":
    main()
