"""Bodies that hold a conversation: chat completions, and those of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from backfill.core.errors import RequestError
from backfill.core.sampling import MAX_LOGPROBS
from backfill.generation.message_format import MAX_CALLS
from backfill.protocol.generation_fields import GenerationFields
from backfill.protocol.parsing import FailFastList, StrictModel, told
from backfill.protocol.tools import FUNCTION_FIELDS, ToolFields, Tools

MAX_MESSAGES = 2048  # OpenAI's
MAX_PARTS = 2048


class TextPart(BaseModel):
    model_config = StrictModel
    type: Annotated[str, told(enum=["text"])]
    text: str | None = None


def _as_object(arguments: object) -> object:
    """Text that is no JSON object, such as that of a call that ``max_tokens`` cut off, stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:  # unlike json, msgspec refuses NaN and halves of characters
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return arguments


class FunctionCall(BaseModel):
    """``arguments`` are text in OpenAI's API, and objects for chat templates where they can be."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: Annotated[
        dict[str, Any] | str, BeforeValidator(_as_object, json_schema_input_type=str | dict[str, Any])
    ] = Field(default_factory=dict)


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
            ]
        },
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[FailFastList[TextPart], Field(max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[FailFastList[ToolCall], Field(max_length=MAX_CALLS)] | None = None

    @property
    def text(self) -> str:
        """Its content, whose text parts are joined."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    def as_template_input(self) -> dict[str, Any]:
        """The message as chat templates expect it.

        ``developer`` is ``system``, arguments of calls are objects. A message without
        calls has no ``tool_calls``: Llama 3's template refuses an empty list.
        """
        role = "system" if self.role == "developer" else self.role
        message = {**(self.model_extra or {}), "role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


Messages = Annotated[FailFastList[ChatMessage], Field(max_length=MAX_MESSAGES)]


class ConversationFields(BaseModel):
    """How the chat template writes a conversation.

    ``add_special_tokens`` adds those that templates usually write themselves, such as BOS.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(GenerationFields, ConversationFields, ToolFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[Messages, told(minItems=1)]
    prompt_field: ClassVar[str] = "messages"
    include_reasoning: bool | None = None
    max_completion_tokens: Annotated[int, told(minimum=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def known_fields(cls) -> list[str]:
        return [*super().known_fields(), *(f"tools.function.{name}" for name in FUNCTION_FIELDS)]

    @property
    def unknown_fields(self) -> list[str]:
        in_tools = {
            f"tools.function.{name}": None
            for tool in self.tools or ()
            for name in tool.function.model_extra or ()
            if name not in FUNCTION_FIELDS
        }
        return [*super().unknown_fields, *in_tools]

    @property
    def json_schemas(self) -> list[tuple[str, object]]:
        of_tools = [("tools", tool.function.parameters) for tool in self.tools or ()]
        return [*super().json_schemas, *of_tools]

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def token_prompts(self) -> list[list[int]]:
        return []

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise RequestError("messages must have at least one message.", param="messages")
        check_conversation(self.messages, self.continue_final_message)
        self.check_tools()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")


def check_conversation(messages: Sequence[ChatMessage], continue_final_message: bool) -> None:
    """Raise RequestError for messages that a chat template cannot be given."""
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise RequestError(f"messages[{index}] of role {message.role} has no content.", param="messages")
    check_parts(messages)
    if continue_final_message and not (messages and messages[-1].role == "assistant"):
        raise RequestError(
            "continue_final_message needs a last message of role assistant.", param="continue_final_message"
        )


def check_parts(messages: Sequence[ChatMessage]) -> None:
    """Raise RequestError for a part that is not text."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"Message parts of type {part.type[:40]!r} are not supported, only text.",
                    param="messages",
                )


class TokenizeRequest(ConversationFields):
    """Body of ``POST /tokenize``: a prompt, or messages.

    ``add_special_tokens`` is true by default for a prompt, and false for messages.
    """

    model_config = ConfigDict(
        **StrictModel,
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("prompt", "messages")
            ]
        },
    )
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Messages, told(minItems=1)] | None = None
    tools: Tools | None = None

    def check(self) -> None:
        """Raise RequestError for a combination of fields that cannot be served."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        if self.messages == []:
            raise RequestError("messages must have at least one message.", param="messages")
        check_conversation(self.messages or (), self.continue_final_message)


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = StrictModel
    model: str | None = None
    tokens: FailFastList[Annotated[int, told(minimum=0)]]
