"""Tools of a chat: their fields, and what they ask of its output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from backfill.core.errors import InvalidRequest, RequestError
from backfill.core.structured import StructuredOutputsParams
from backfill.generation.message_format import Format, MessageFormat
from backfill.generation.message_parser import MessageParsing
from backfill.protocol.parsing import FailFastList

MAX_TOOLS = 128  # OpenAI's
MAX_NAME_CHARS = 64  # OpenAI's
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "return")  # the last: chat templates'
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(BaseModel):
    """``strict`` changes nothing: forced calls always follow ``parameters``, others are the model's own."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object", **(self.function.parameters or _NO_PARAMETERS)}


class FunctionName(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: str


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["function"]
    function: FunctionName


def _check_choice(value: object, check: Callable[[object], Any]) -> Any:
    """One error for all the forms that are allowed, where pydantic has one for each."""
    try:
        return check(value)
    except ValidationError:
        named = '{"type": "function", "function": {"name": ...}}'
        raise ValueError(f"Input should be 'none', 'auto', 'required' or {named}") from None


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedToolChoice, WrapValidator(_check_choice)]
Tools = Annotated[FailFastList[Tool], Field(max_length=MAX_TOOLS)]


class ToolFields(BaseModel):
    """Which tools a chat may call, and must."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def chosen(self) -> Literal["none", "auto", "required"] | FunctionName:
        """Without tools: none."""
        if not self.tools:
            return "none"
        choice = self.tool_choice
        return choice.function if isinstance(choice, NamedToolChoice) else choice or "auto"

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the arguments of the tools that may be called, by name."""
        chosen = self.chosen
        return {
            tool.function.name: tool.schema_of_arguments
            for tool in self.tools or ()
            if not isinstance(chosen, FunctionName) or tool.function.name == chosen.name
        }

    def check_tools(self) -> None:
        """Raise RequestError for tools that cannot be called, or a choice that is none of them."""
        names: set[str] = set()
        for index, tool in enumerate(self.tools or ()):
            name = tool.function.name
            if not _NAME.fullmatch(name):
                raise RequestError(
                    f"tools[{index}].function.name must be 1 to {MAX_NAME_CHARS} of the characters a-z, A-Z, "
                    f"0-9, _, . and -, got {name[:80]!r}.",
                    param="tools",
                )
            if name in names:
                raise RequestError(f"tools[{index}].function.name {name!r} is another tool's.", param="tools")
            names.add(name)
            if tool.schema_of_arguments["type"] != "object":
                raise RequestError(
                    f"tools[{index}].function.parameters must be the schema of an object, got type "
                    f"{tool.schema_of_arguments['type']!r:.80}.",
                    param="tools",
                )
        choice = self.tool_choice
        if choice == "required" and not names:
            raise RequestError("tool_choice 'required' needs tools.", param="tool_choice")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name[:80]!r}, which is none of tools.",
                param="tool_choice",
            )

    def check_schemas(self, check: Callable[[StructuredOutputsParams], object]) -> None:
        """Raise RequestError naming the first tool that may be called and whose schema ``check`` refuses."""
        for name, schema in self.schemas.items() if self.chosen != "none" else ():
            try:
                check(StructuredOutputsParams(json=schema))
            except RequestError as error:
                raise RequestError(f"Tool {name!r}: {error}", param="tools") from None


def tool_inputs(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools as chat templates expect them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools or ()]


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """What a chat's output must be, and how it is parsed.

    Attributes:
        field: of the body, that asks for ``structured``.
        parsing: None where all of the output is content.
    """

    structured: StructuredOutputsParams | None
    field: str
    parsing: MessageParsing | None = None


def plan_message(
    fields: ToolFields,
    structured: StructuredOutputsParams | None,
    field: str,
    message_format: MessageFormat,
    begun: str,
    *,
    returns_reasoning: bool,
) -> MessagePlan:
    """Raises: RequestError for what the model's family cannot do, or not together.

    A grammar that the client sends holds the whole output, which then has no reasoning.

    Args:
        structured, field: what the body asks for without its tools, and the field that does.
        begun: the part of the answer that its prompt ends with.
    """
    chosen = fields.chosen
    is_parallel = fields.parallel_tool_calls is not False and not isinstance(chosen, FunctionName)
    match chosen:
        case "none":
            if structured is not None or message_format.reasoning is None:
                return MessagePlan(structured, field)
            return MessagePlan(None, field, MessageParsing(begun=begun, returns_reasoning=returns_reasoning))
        case "auto":
            if message_format.calls is None:
                raise RequestError(
                    "How this model writes calls of tools is not known. Send tool_choice 'required', "
                    "'none' or a function, or start the server with the option --tool-call-parser.",
                    param="tool_choice",
                )
            if structured is None:
                parsing = MessageParsing(
                    calls="free", begun=begun, is_parallel=is_parallel, returns_reasoning=returns_reasoning
                )
                return MessagePlan(None, field, parsing)
            calls = message_format.calls.structure(fields.schemas, is_parallel=is_parallel)
            either: Format = {"type": "or", "elements": [_as_format(structured, field), calls]}
            return MessagePlan(_tag(either), field, MessageParsing(calls="free", is_parallel=is_parallel))
    if structured is not None:
        raise RequestError(f"tool_choice {_shown(chosen)} leaves no place for {field}.", param="tool_choice")
    calls = message_format.forced_calls.structure(fields.schemas, is_parallel=is_parallel)
    return MessagePlan(
        _tag(message_format.forced(calls, begun)),
        "tools",
        MessageParsing(
            calls="forced", begun=begun, is_parallel=is_parallel, returns_reasoning=returns_reasoning
        ),
    )


def _as_format(structured: StructuredOutputsParams, field: str) -> Format:
    if structured.kind not in ("json", "json_object"):
        raise RequestError(
            f"Beside tools, {field} may be json or json_object, unless tool_choice is 'none'; got "
            f"{structured.kind}.",
            param=field,
        )
    try:
        return {"type": "json_schema", "json_schema": json.loads(structured.text)}
    except (ValueError, RecursionError):
        raise RequestError(f"{field} is no JSON schema.", param=field) from None


def _tag(form: Mapping[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(structural_tag={"format": form})
    except InvalidRequest as error:
        message = str(error).replace("structured_outputs.structural_tag", "The grammar of tools")
        raise RequestError(message, param="tools") from None


def _shown(choice: str | FunctionName) -> str:
    return repr(choice if isinstance(choice, str) else choice.name)
