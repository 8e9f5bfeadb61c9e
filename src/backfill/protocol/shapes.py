"""What the bodies of the two endpoints differ in: texts, messages and log probabilities as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from backfill.core.plan import TokenLogprobs
from backfill.generation.detokenizer import IncrementalDetokenizer
from backfill.generation.message_parser import MessageDelta, MessageParser, MessageParsing, ToolCallDelta
from backfill.generation.tokenizer import Tokenizer

Json = dict[str, Any]


class ResponseShape(ABC):
    """What the two endpoints' bodies differ in."""

    object: str
    chunk_object: str
    has_one_prompt: bool

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def parser(self, parsing: MessageParsing | None) -> MessageParser | None:
        """What splits an output; None where all of it is content."""
        return None if parsing is None else MessageParser(self._tokenizer.message_format, parsing)

    @abstractmethod
    def delta(self, added: str | MessageDelta) -> Json:
        """Text in a chunk, or what it adds to a message."""

    @abstractmethod
    def opening(self, echoed: str) -> Json | None:
        """What a choice's first chunk holds; None if nothing precedes the output."""

    @abstractmethod
    def whole(self, output: str | MessageDelta) -> Json:
        """A whole output, which has been parsed or not."""

    @abstractmethod
    def logprobs(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> Json:
        """One token's log probabilities. ``num_chars``: length of its choice's text before it."""

    def prompt_logprobs(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> list[Json | None]:
        """vLLM's field: for each prompt token but the first, it and the most likely ones by token id."""
        text = self._tokenizer.token_text
        entries: list[Json | None] = [None]
        for token_id, each in zip(token_ids[1:], logprobs, strict=True):
            ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(each.top, start=1)]
            entries.append(
                {
                    str(other): {"logprob": logprob, "rank": rank, "decoded_token": text(other)}
                    for other, logprob, rank in [(token_id, each.logprob, each.rank), *ranked]
                }
            )
        return entries


class ChatShape(ResponseShape):
    """Bodies of ``/v1/chat/completions``."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def delta(self, added: str | MessageDelta) -> Json:
        if isinstance(added, str):
            return {"delta": {"content": added}}
        parts: Json = {"content": added.content} if added.content else {}
        parts |= _reasoning(added)
        if added.tool_calls:
            parts["tool_calls"] = [{"index": call.index, **_tool_call(call)} for call in added.tool_calls]
        return {"delta": parts}

    def opening(self, echoed: str) -> Json | None:
        return {"delta": {"role": "assistant", "content": echoed}}

    def whole(self, output: str | MessageDelta) -> Json:
        return {"message": whole_message(MessageDelta(output) if isinstance(output, str) else output)}

    def logprobs(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> Json:
        top = [self._entry(other, logprob) for other, logprob in logprobs.top]
        return {"content": [{**self._entry(token_id, logprobs.logprob), "top_logprobs": top}]}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token_id))}


class CompletionShape(ResponseShape):
    """Bodies of ``/v1/completions``."""

    object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def delta(self, added: str | MessageDelta) -> Json:
        return {"text": added}

    def opening(self, echoed: str) -> Json | None:
        return {"text": echoed} if echoed else None

    def whole(self, output: str | MessageDelta) -> Json:
        return {"text": output}

    def logprobs(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> Json:
        return {
            "tokens": [self._tokenizer.token_text(token_id)],
            "token_logprobs": [logprobs.logprob],
            "top_logprobs": [self._top(token_id, logprobs, len(logprobs.top))],
            "text_offset": [num_chars],
        }

    def echoed_logprobs(
        self, echoed: str, token_ids: list[int], logprobs: Sequence[TokenLogprobs], num_top: int
    ) -> Json:
        """Those of a prompt that is echoed, with ``num_top`` of the most likely tokens each."""
        detokenizer = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens=False)
        lens = [len(detokenizer.push(token_id)) for token_id in token_ids]
        # Special tokens that the tokenizer adds at the start are not in the text.
        num_added = sum(lens) + len(detokenizer.flush()) - len(echoed)
        return {
            "tokens": [self._tokenizer.token_text(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(each.logprob for each in logprobs)],
            "top_logprobs": [
                None,
                *(
                    self._top(token_id, each, num_top)
                    for token_id, each in zip(token_ids[1:], logprobs, strict=True)
                ),
            ],
            "text_offset": [
                max(0, end - num - num_added) for end, num in zip(accumulate(lens), lens, strict=True)
            ],
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs, num_top: int) -> dict[str, float]:
        """By text, most likely first, then the token itself; of tokens with one text, the most likely one."""
        found: dict[str, float] = {}
        for each, logprob in [*logprobs.top[:num_top], (token_id, logprobs.logprob)]:
            found.setdefault(self._tokenizer.token_text(each), logprob)
        return found


def whole_message(message: MessageDelta) -> Json:
    """A whole message of OpenAI's, as it may be sent back."""
    has_others = message.reasoning or message.tool_calls
    parts: Json = {"role": "assistant", "content": message.content or (None if has_others else "")}
    parts |= _reasoning(message)
    if message.tool_calls:
        parts["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return parts


def _reasoning(message: MessageDelta) -> Json:
    """Under both of vLLM's names, the older one last."""
    text = message.reasoning
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _tool_call(call: ToolCallDelta) -> Json:
    """A call, or what is added to one that has begun."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
