"""Random prompts as text, for endpoints that take no token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_MOST_ROUNDS = 8


class TextTokenizer(Protocol):
    """What building prompts needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


def text_of(
    prompt: list[int],
    tokenizer: TextTokenizer,
    ids: tuple[int, int],
    rng: np.random.Generator,
    *,
    lead: str = "",
) -> str:
    """``lead`` and text that adds the number of tokens in ``prompt`` to it, or nearly.

    Decoding and encoding rarely keeps the number of random ids, so ids are added or cut in several rounds.

    Args:
        ids: half-open range to draw more ids from.
    """
    lead_len, wanted = len(tokenizer.encode(lead, add_special_tokens=False)) if lead else 0, len(prompt)
    for _ in range(_MOST_ROUNDS):
        text = lead + tokenizer.decode(prompt)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) == lead_len + wanted:
            return text
        prompt = encoded[lead_len : lead_len + wanted]
        prompt = prompt + rng.integers(*ids, wanted - len(prompt)).tolist()
    return text
