"""llama.cpp on the work of peers.py, through llama-cpp-python; prints one JSON line with its figures.

Requests are sequences of one context, prompts and decodes are calls of `llama_decode`, and the next token
is numpy's argmax. Batch, stream and first tokens are timed from the first prompt's call to the last token.

Usage: llama_batch.py MODEL.gguf [--threads 2] [--num-prompts 64] [--input-len 256] [--output-len 128]
           [--stream-len 256] [--first-token-samples 5]
"""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp as llama
import numpy as np
from peer_work import measure, parser_of

MOST_TOKENS = 2048  # of one call


class Context:
    """Sequences of up to ``length`` tokens each, computed side by side."""

    def __init__(self, path: str, num_seqs: int, length: int, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_seqs * length, num_seqs
        params.n_batch = MOST_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp could not make a context")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(MOST_TOKENS, 0, 1)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def next_tokens(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
        """Args: parts: of each sequence its index, the position of the first token, and the tokens."""
        batch, count, last = self._batch, 0, []
        for index, start, tokens in parts:
            for position, token in enumerate(tokens, start):
                batch.token[count], batch.pos[count] = token, position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, index
                batch.logits[count] = position == start + len(tokens) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if llama.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama.cpp could not decode")
        logits = (llama.llama_get_logits_ith(self._context, at) for at in last)
        return [int(np.argmax(np.ctypeslib.as_array(each, (self.vocab_size,)))) for each in logits]

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        at_once = max(1, MOST_TOKENS // len(prompts[0]))
        tokens: list[int] = []
        for first in range(0, len(prompts), at_once):
            chosen = range(first, min(first + at_once, len(prompts)))
            tokens += self.next_tokens([(index, 0, prompts[index]) for index in chosen])
        for position in range(len(prompts[0]), len(prompts[0]) + output_len - 1):
            tokens = self.next_tokens([(index, position, [token]) for index, token in enumerate(tokens)])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    batched = Context(args.model, args.num_prompts, args.input_len + args.output_len, args.threads)
    alone = Context(args.model, 1, args.input_len + args.stream_len, args.threads)

    def generate(prompts: Sequence[Sequence[int]], output_len: int) -> None:
        context = batched if len(prompts) > 1 else alone
        context.clear()
        context.generate(prompts, output_len)

    measure("llama.cpp", args, alone.vocab_size, generate)


if __name__ == "__main__":
    main()
