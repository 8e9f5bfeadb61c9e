"""Token ids to text, one at a time, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from backfill.generation.tokenizer import Tokenizer

_NUM_PRIMING_TOKENS = 8


class IncrementalDetokenizer:
    """Text of an output as its tokens arrive; characters are emitted only when whole.

    Some tokenizers (SentencePiece) drop a token's leading space at the start of a text. For these the
    end of the prompt is decoded first and thrown away, unless it ends inside a character, whose
    replacement would then come out with the first token.
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
        """The text that this token completes; empty while a character is incomplete."""
        text = self._step(token_id)
        if text is None:
            self._withheld.append(token_id)
            return ""
        self._withheld.clear()
        return text

    def flush(self) -> str:
        """What is left when no more tokens come; an incomplete character becomes U+FFFD."""
        text = self._tokenizer.decode(self._withheld, skip_special_tokens=self._skip_special_tokens)
        self._withheld.clear()
        return text

    def _step(self, token_id: int) -> str | None:
        backend = self._tokenizer.backend
        try:
            text: str | None = self._stream.step(backend, token_id)
        except Exception:
            # The stream gives up when an invalid byte sequence changes text already emitted.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            text = self._stream.step(backend, token_id)
        return text


class StopStrings:
    """Finds the first stop string in a growing text and withholds text that may begin one."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._pending = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text that may be shown, the stop string found or None)."""
        if not self._stops:
            return text, None
        self._pending += text
        found = min(
            ((self._pending.find(stop), stop) for stop in self._stops if stop in self._pending),
            default=None,
        )
        if found is not None:
            index, stop = found
            end = index + len(stop) if self._include_in_output else index
            shown, self._pending = self._pending[:end], ""
            return shown, stop
        keep = self._longest_beginning()
        shown, self._pending = (
            self._pending[: len(self._pending) - keep],
            self._pending[len(self._pending) - keep :],
        )
        return shown, None

    def flush(self) -> str:
        """The text withheld, when it can no longer become a stop string."""
        shown, self._pending = self._pending, ""
        return shown

    def _longest_beginning(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        for length in range(min(len(self._pending), max(map(len, self._stops)) - 1), 0, -1):
            end = self._pending[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
