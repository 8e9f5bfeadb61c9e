"""How requests are read, by a server or from a file, and how large their responses may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backfill.core.config import check_log_level
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.generation.message_format import ReasoningParserName, ToolCallParserName

MAX_RESPONSE_TOKENS = 1 << 20  # a response stays in memory until its client has read it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Rules for requests, and the names that they call the model by.

    Attributes:
        served_model_name: name clients use; repeatable, the first is echoed. Default: what the model is
            called.
        chat_template: file with a Jinja chat template to use instead of the model's.
        tool_call_parser: how the model writes calls of tools. auto: as its chat template does.
        reasoning_parser: how the model marks its reasoning, which chats then have beside the content. auto:
            as its chat template does; none: reasoning is content.
        generation_config: where sampling defaults come from. auto: the model; vllm: none.
        strict: refuse requests with unknown fields or an empty slo, rather than warn of them. Known fields
            that are ignored, such as metadata, and keys inside messages are accepted.
        log_level: DEBUG, INFO, WARNING or ERROR.
    """

    served_model_name: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    generation_config: Literal["auto", "vllm"] = "auto"
    strict: bool = False
    log_level: str = "INFO"

    @property
    def uses_generation_config(self) -> bool:
        """Whether the model's own sampling defaults hold."""
        return self.generation_config == "auto"

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        check_log_level(self.log_level)
        if "" in self.served_model_name:
            raise ConfigError("must not be empty.", field="served_model_name")


def read_template(path: Path | None) -> str | None:
    """Read a chat template and check that it parses. Raises: ConfigError."""
    if path is None:
        return None
    try:
        template = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"`chat_template` {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"`chat_template` {path} is not UTF-8: {error}.") from error
    check_template(template, f" {path}")
    return template


def check_template(template: str, which: str = "") -> None:
    """Raise ConfigError for Jinja source that does not parse."""
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        if "'generation'" not in str(error):  # a tag that transformers adds
            raise ConfigError(f"`chat_template`{which}, line {error.lineno}: {error.message}") from error
