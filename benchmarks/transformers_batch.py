"""transformers' own continuous batching on the work of peers.py; prints one JSON line with its figures.

Batch, stream and first tokens are timed from adding the prompts to the last token, prefill included, in the
order of the other engines' scripts and after the same warm-up.

Usage: transformers_batch.py MODEL [--num-prompts 64] [--input-len 256] [--output-len 128]
           [--stream-len 256] [--first-token-samples 5]
"""

from __future__ import annotations

import torch
from peer_work import measure, parser_of
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

# As large as Backfill's pool in this comparison, about 1 GiB.
POOL = ContinuousBatchingConfig(page_size=16, num_blocks=2900, max_batch_tokens=2048)


def main() -> None:
    args = parser_of(__doc__).parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    # A negative id is never drawn, so no token ends a sequence.
    settings = GenerationConfig(max_new_tokens=args.output_len, do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=POOL) as manager:

        def generate(prompts: list[list[int]], output_len: int) -> None:
            manager.add_requests(prompts, max_new_tokens=output_len)
            lengths = []
            while len(lengths) < len(prompts):
                output = manager.get_result(timeout=300)
                if output is None:
                    raise SystemExit("no result within 300 s")
                if output.is_finished():
                    lengths.append(len(output.generated_tokens))
            if lengths != [output_len] * len(prompts):
                raise SystemExit(f"expected {len(prompts)} outputs of {output_len} tokens, got {lengths}")

        measure("transformers", args, model.config.vocab_size, generate)


if __name__ == "__main__":
    main()
