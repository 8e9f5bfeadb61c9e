"""``response_format``: OpenAI's way to say what an output must be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from backfill.core.errors import InvalidRequest, RequestError
from backfill.core.structured import StructuredOutputsParams


class JsonSchema(BaseModel):
    """OpenAI's ``strict`` changes nothing: the output always follows the schema."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None

    @classmethod
    def known_fields(cls) -> list[str]:
        """Names of the fields; nested ones with their path."""
        inner = (field.alias or name for name, field in JsonSchema.model_fields.items())
        return [*cls.model_fields, *(f"json_schema.{name}" for name in inner)]

    @property
    def unknown_fields(self) -> list[str]:
        """Names in the body that have no effect; nested ones with their path."""
        unknown = [] if self.type == "structural_tag" else [*(self.model_extra or ())]
        inner = None if self.json_schema is None else self.json_schema.model_extra
        return [*unknown, *(f"json_schema.{name}" for name in inner or ())]

    @property
    def structured(self) -> StructuredOutputsParams | None:
        """Raises: RequestError."""
        try:
            match self.type:
                case "json_object":
                    if "schema" in (self.model_extra or {}):
                        raise RequestError(
                            "response_format of type json_object takes no schema. Use type json_schema, with "
                            "'json_schema': {'name': ..., 'schema': ...}.",
                            param="response_format",
                        )
                    return StructuredOutputsParams(json_object=True)
                case "structural_tag":
                    return StructuredOutputsParams(structural_tag=self.model_extra or {})
                case "json_schema":
                    if self.json_schema is None:
                        raise RequestError(
                            "Missing required parameter: 'response_format.json_schema'.",
                            param="response_format",
                            code="missing_required_parameter",
                        )
                    return StructuredOutputsParams(json=self.json_schema.schema_ or {})
        except InvalidRequest as error:
            raise RequestError(
                str(error)
                .replace("structured_outputs.json ", "response_format.json_schema.schema ")
                .replace("structured_outputs", "response_format"),
                param="response_format",
            ) from None
        return None
