"""Parses the prompts and conversations that users pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar, cast

from backfill.core.errors import InvalidRequest
from backfill.core.sampling import are_integers
from backfill.generation.message_parser import MessageParsing
from backfill.llm.options import in_library_terms


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]

PerPrompt = TypeVar("PerPrompt")

_PROMPT_FORMS = (
    'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}, both also with "cache_salt"'
)


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt, as text or as token ids. Its salt is not checked yet. ``parsing``: of a chat's outputs."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    parsing: MessageParsing | None = None


def parse_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PromptInput]:
    """Parse one prompt or a list of prompts. Raises: InvalidRequest."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [parse_prompt(prompts)]
    if not _is_list(prompts):
        raise InvalidRequest(
            f"prompts must be one prompt or a list of them, got {prompts!r:.80}.", param="prompts"
        )
    return [parse_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def parse_prompt(prompt: object, name: str = "prompt") -> PromptInput:
    """Parse one prompt; ``name`` is for messages. Raises: InvalidRequest."""
    parsed = _parse_prompt(prompt)
    if parsed is None:
        raise InvalidRequest(f"{name} must be {_PROMPT_FORMS}, got {prompt!r:.80}.", param=name)
    if not (parsed.text or parsed.token_ids):
        raise InvalidRequest(f"{name} must not be empty.", param=name)
    return parsed


def parse_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or a list of them, as chat templates expect them. Raises: InvalidRequest."""
    if not _is_list(messages):
        raise InvalidRequest(
            f"messages must be a conversation, a list of dicts, or a list of conversations, "
            f"got {messages!r:.80}.",
            param="messages",
        )
    if not messages or isinstance(messages[0], Mapping):
        return [parse_conversation(messages)]
    return [parse_conversation(each, f"messages[{index}]") for index, each in enumerate(messages)]


def parse_conversation(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Raises: InvalidRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(f"{name} must be a list of messages, got {messages!r:.80}.", param="messages")
    return [_parse_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def parse_tools(tools: object) -> list[dict[str, Any]]:
    """Functions in OpenAI's form. Raises: InvalidRequest."""
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
    for index, tool in enumerate(cast(Sequence[object], tools) if is_list else [tools]):
        match tool:
            case {"type": "function", "function": {"name": str()}} if is_list:
                continue
        name = f"tools[{index}]" if is_list else "tools"
        form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise InvalidRequest(
            f"{name} must be {form if is_list else f'a list of {form}'}, got {tool!r:.80}.", param="tools"
        )
    return [dict(tool) for tool in cast(Sequence[Mapping[str, Any]], tools)]


def one_each(given: PerPrompt | Sequence[PerPrompt], count: int, name: str) -> list[PerPrompt]:
    """A list with one value for each prompt. Raises: InvalidRequest for a list of another length."""
    if not _is_list(given):
        return [cast(PerPrompt, given)] * count
    values = list(cast(Sequence[PerPrompt], given))
    if len(values) != count:
        raise InvalidRequest(
            f"{name} must be one for each of {count} prompts, got {len(values)}.", param=name
        )
    return values


def _parse_prompt(prompt: Any) -> PromptInput | None:
    """None if it is not a prompt."""
    if isinstance(prompt, str):
        return PromptInput(text=prompt)
    if isinstance(prompt, Mapping):
        match dict(prompt):
            case {"prompt": str() as text, **others} if others.keys() <= {"cache_salt"}:
                return PromptInput(text=text, cache_salt=others.get("cache_salt"))
            case {"prompt_token_ids": ids, **others} if others.keys() <= {"cache_salt"}:
                if _is_list(ids) and are_integers(ids):
                    token_ids = [int(token_id) for token_id in ids]
                    return PromptInput(token_ids=token_ids, cache_salt=others.get("cache_salt"))
        return None
    if _is_list(prompt) and are_integers(prompt):
        return PromptInput(token_ids=[int(token_id) for token_id in prompt])
    return None


def _parse_message(message: object, name: str) -> dict[str, Any]:
    # Imported here, as pydantic is slow to import and only conversations need it.
    from pydantic import ValidationError

    from backfill.protocol.chat import ChatMessage, check_parts

    try:
        parsed = ChatMessage.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"{name}['{first['loc'][0]}']" if first["loc"] else name
        raise InvalidRequest(f"{where}: {first['msg']}, got {message!r:.80}.", param="messages") from None
    with in_library_terms(f"{name}: "):
        check_parts([parsed])
    return parsed.as_template_input()


def _is_list(value: object) -> bool:
    """Whether it is a list, tuple or array; numpy's arrays are no ``Sequence``."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _are_token_ids(values: Any) -> bool:
    return _is_list(values) and len(values) > 0 and are_integers(values)
