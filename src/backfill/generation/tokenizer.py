"""A model's tokenizer and chat template, loaded without torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers.decoders import ByteLevel

from backfill.core.errors import CorruptModel, ModelError, RequestError
from backfill.generation.message_format import MessageFormat, ReasoningParserName, ToolCallParserName
from backfill.generation.message_parser import MessageParsing
from backfill.models.folder_check import check_tokenizer
from backfill.models.resolve import told_what_to_delete

# Longest text if nothing else bounds its tokens: encoding takes 200 times the text's memory.
MAX_CHARS = 1 << 20
# Extra tokens kept before the needed ones, so that cutting the text changes none of the needed ones.
_CUT_MARGIN_TOKENS = 64


_PLAIN = MessageFormat()


class Tokenizer:
    """Text to token ids and back.

    Wraps a fast tokenizer of ``transformers``: its Rust core encodes, its Jinja sandbox renders chat
    templates.

    Attributes:
        message_format: how the model writes calls of tools and reasoning.
    """

    def __init__(self, wrapped: Any, message_format: MessageFormat = _PLAIN) -> None:
        self.wrapped = wrapped
        self.message_format = message_format
        self.backend = wrapped.backend_tokenizer
        self._special_ids = frozenset(wrapped.all_special_ids)
        self.is_byte_level = isinstance(self.backend.decoder, ByteLevel)
        self._decoded: dict[int, str] = {}
        self._longest_token = max(map(len, wrapped.get_vocab()), default=1)
        # Names that template_kwargs must not contain: some would replace the template.
        self._template_parameters = frozenset(inspect.signature(wrapped.apply_chat_template).parameters)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        chat_template: str | None = None,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> Tokenizer:
        """Load from a Hugging Face style folder.

        Args:
            chat_template: Jinja source that replaces the folder's own.
            tool_call_parser, reasoning_parser: auto: as the chat template writes messages.
        Raises: ModelError if the folder has no readable tokenizer, CorruptModel if its files are damaged.
        """
        with told_what_to_delete(folder):
            try:
                wrapped = _load(folder)
            except ModelError:
                raise
            except Exception as error:  # the library raises many kinds, even bare Exception
                reason = f"{type(error).__name__}: {error}"
                raise CorruptModel(f"The tokenizer in {folder} cannot be read: {reason}") from error
        if chat_template is not None:
            wrapped.chat_template = chat_template
        text = "\n".join(_templates_of(wrapped))
        return cls(wrapped, MessageFormat.of(text, tool_call_parser, reasoning_parser))

    @property
    def chat_templates(self) -> list[str]:
        """Jinja sources: none, one, or several with names."""
        return _templates_of(self.wrapped)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        most_tokens: int | None = None,
        last_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            most_tokens: refuse a text that must have more tokens, before encoding it.
            last_tokens: only this many tokens at the end are needed; the start of a longer text is cut off.
        Raises: RequestError for a text that is too long for ``most_tokens``; without ``most_tokens`` and
            ``last_tokens``, for a text over ``MAX_CHARS``.
        """
        if most_tokens is not None and len(text) > most_tokens * self._longest_token:
            raise RequestError(
                f"The prompt of {len(text)} characters exceeds this model's maximum context length of "
                f"{most_tokens} tokens.",
                param="prompt",
                code="context_length_exceeded",
            )
        if most_tokens is None and last_tokens is None and len(text) > MAX_CHARS:
            raise RequestError(
                f"At most {MAX_CHARS} characters are tokenized at once, got {len(text)}.", param="prompt"
            )
        if last_tokens is not None:
            text = text[-(last_tokens + _CUT_MARGIN_TOKENS) * self._longest_token :]
        # Unlike other methods, encode_batch_fast releases the interpreter's lock for the whole time.
        try:
            (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # it takes UTF-8 alone
            message = "A text to tokenize must be valid Unicode, got half of a surrogate pair."
            raise RequestError(message, param="prompt") from None
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def spellings(self, words: Iterable[str]) -> list[list[int]]:
        """How the tokenizer writes each of these words: at the start of a text, and after a space.

        As vLLM's ``bad_words``: with the space only if that makes as many tokens and another first one.
        """
        found: list[list[int]] = []
        for word in words:
            bare, spaced = (
                self.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " ")
            )
            found.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return [each for each in found if each]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the conversation with the chat template, which writes special tokens such as BOS itself.

        Args:
            tools: functions that the model may call, in OpenAI's form; templates of models that know none
                leave them out.
        Raises: RequestError if there is no template, or if it refuses the messages.
        """
        reserved = sorted(self._template_parameters.intersection(template_kwargs or {}))
        if reserved:
            raise RequestError(
                f"chat_template_kwargs may only hold variables of the template, not {', '.join(reserved)}.",
                param="chat_template_kwargs",
            )
        if not self.wrapped.chat_template:
            raise RequestError(
                "This model has no chat template: send a prompt (/v1/completions, generate), or start it "
                "with the option chat_template.",
                param="messages",
            )
        try:
            text: str = self.wrapped.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:  # templates may raise any error
            place = _text_arguments(messages)
            hint = "" if place is None else f". {place} is no JSON object."
            raise RequestError(
                f"The chat template refused the messages: {error}{hint}", param="messages"
            ) from error
        return text

    def needs_marks(self, parsing: MessageParsing) -> bool:
        """Whether the text must have special tokens, as some tell the parts of a message apart."""
        return bool(self._special_marks) and (
            parsing.calls != "none" or self.message_format.reasoning is not None
        )

    @cached_property
    def _special_marks(self) -> set[str]:
        special = {
            token.content for token in self.backend.get_added_tokens_decoder().values() if token.special
        }
        return special.intersection(self.message_format.marks)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; with replacement characters if it is part of a character."""
        text = self._decoded.get(token_id)
        if text is None:
            text = self._decoded[token_id] = self.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also if they are only part of a character."""
        token: str = self.backend.id_to_token(token_id) or ""
        if self.is_byte_level and token_id not in self._special_ids:
            table = _byte_level_alphabet()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return self.token_text(token_id).encode()


def _templates_of(wrapped: Any) -> list[str]:
    templates = wrapped.chat_template or {}
    return [templates] if isinstance(templates, str) else list(templates.values())


def _text_arguments(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The place of the first arguments of a call that are text, as those that are no JSON object."""
    return next(
        (
            f"messages[{number}].tool_calls[{index}].function.arguments"
            for number, message in enumerate(messages)
            for index, call in enumerate(message.get("tool_calls") or ())
            if isinstance(call["function"]["arguments"], str)
        ),
        None,
    )


def _load(folder: Path) -> Any:
    check_tokenizer(folder)
    if (folder / "tokenizer.json").is_file():
        # AutoTokenizer would import torch.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    wrapped = AutoTokenizer.from_pretrained(folder)
    if not wrapped.is_fast:
        raise ModelError(f"The tokenizer in {folder} has no fast form; add a tokenizer.json.")
    return wrapped


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character in byte-level vocabularies (GPT-2).

    Printable bytes are their own characters; the others are U+0100 and following.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
