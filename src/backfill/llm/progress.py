"""Progress on standard error: a bar while ``LLM`` generates, lines while it downloads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from backfill.llm.outputs import RequestOutput

# True shows a bar; a callable creates it, with the arguments of ``tqdm.tqdm``.
UseTqdm = bool | Callable[..., Any]


class GenerationBar:
    """Finished prompts, and tokens per second. Close it after use."""

    def __init__(self, use_tqdm: UseTqdm, num_prompts: int) -> None:
        self._bar: Any = None
        self._started_at_s = time.monotonic()
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        if use_tqdm:
            make = _default_bar() if use_tqdm is True else use_tqdm
            self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._num_input_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        elapsed_s = max(time.monotonic() - self._started_at_s, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_input_tokens / elapsed_s:.1f} toks/s, "
            f"output: {self._num_output_tokens / elapsed_s:.1f} toks/s",
            refresh=False,
        )
        self._bar.update(1)


class FetchLines:
    """A line for each step of a model's download, which may take minutes. A ``models.resolve.Progress``."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._step = ""

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self._step:
            self._step = step
            print(f"backfill: {step} {self._model} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)


def _default_bar() -> Callable[..., Any]:
    from tqdm.auto import tqdm

    make: Callable[..., Any] = tqdm
    return make
