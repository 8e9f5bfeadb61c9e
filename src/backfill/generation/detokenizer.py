"""Token ids to text, one token at a time, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from tokenizers.decoders import DecodeStream

from backfill.generation.tokenizer import Tokenizer

_NUM_PRIMING_TOKENS = 8


class IncrementalDetokenizer:
    """Text of an output as its tokens arrive. A character is emitted once it is complete.

    Some tokenizers (SentencePiece) drop the leading space of a text's first token. For these the end of the
    prompt is decoded first and its text dropped. A prompt that ends inside a character is not: the first
    token's text would begin with a replacement character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        priming = [] if tokenizer.is_byte_level else list(prompt_token_ids[-_NUM_PRIMING_TOKENS:])
        if not tokenizer.decode(priming).endswith("\ufffd"):
            for token_id in priming:
                self._step(token_id)
        self._withheld: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while its character is incomplete."""
        text = self._step(token_id)
        if text is None:
            self._withheld.append(token_id)
            return ""
        self._withheld.clear()
        return text

    def flush(self) -> str:
        """The rest, after the last token; an incomplete character becomes U+FFFD."""
        text = self._tokenizer.decode(self._withheld, skip_special_tokens=self._skip_special_tokens)
        self._withheld.clear()
        return text

    def _step(self, token_id: int) -> str | None:
        backend = self._tokenizer.backend
        try:
            text: str | None = self._stream.step(backend, token_id)
        except Exception:
            # The stream raises when an invalid byte sequence changes text already emitted.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            text = self._stream.step(backend, token_id)
        return text


@dataclass(slots=True)
class StopStrings:
    """Finds the first stop string in a growing text. Withholds text that may begin one."""

    stops: Sequence[str]
    _: KW_ONLY
    include_in_output: bool
    _pending: str = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Returns: text that may be shown, and the stop string if one was found."""
        if not self.stops:
            return text, None
        self._pending += text
        found = min(
            ((self._pending.find(stop), stop) for stop in self.stops if stop in self._pending),
            default=None,
        )
        if found is not None:
            index, stop = found
            end = index + len(stop) if self.include_in_output else index
            shown, self._pending = self._pending[:end], ""
            return shown, stop
        end = len(self._pending) - self._longest_prefix()
        shown, self._pending = self._pending[:end], self._pending[end:]
        return shown, None

    def flush(self) -> str:
        """The withheld text, after the last token."""
        shown, self._pending = self._pending, ""
        return shown

    def _longest_prefix(self) -> int:
        """Length of the longest suffix of the pending text that is a prefix of a stop string."""
        for length in range(min(len(self._pending), max(map(len, self.stops)) - 1), 0, -1):
            end = self._pending[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0
