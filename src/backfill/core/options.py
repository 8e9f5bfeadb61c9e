"""Options are fields of configuration dataclasses: the command line, ``LLM`` and files read them from here.

An option's name, type and default are the field's. Its help is the field's entry in the ``Attributes:``
section of the class's docstring. A dataclass may hold others; their options are then its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin

from backfill.core.errors import ConfigError

Config = TypeVar("Config", bound="Dataclass")
Default = TypeVar("Default")

_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    types.NoneType: "None",
}
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:\n|[ ]+.*\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {5,}.+)*)", re.MULTILINE)
_NAME = re.compile(r"`{1,2}(\w+)`{1,2}")


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers: ``least`` and ``most`` are in it, ``above``, ``below`` and infinity are not."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def check(self, field: str, value: float) -> None:
        """Raises: ConfigError for a number that is not in it."""
        if value not in self:
            allowed = str(self) if math.isfinite(value) else f"finite and {self}"
            raise ConfigError(f"must be {allowed}, got {value!r:.80}.", field=field)

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if -math.inf < self.least and self.most < math.inf:
            return f"between {self.least} and {self.most}"
        lower = f"above {self.above}" if -math.inf < self.above else f"at least {self.least}"
        if self.most < math.inf:
            return f"{lower} and at most {self.most}"
        return f"{lower} and below {self.below}" if self.below < math.inf else lower


@dataclass(frozen=True, slots=True)
class Option:
    """One field.

    Attributes:
        kind: the field's type.
        default: ``MISSING`` where a value must be given.
        bounds: of a number; None for any.
        is_secret: the value may not be shown.
    """

    name: str
    kind: object
    default: object
    help: str
    is_secret: bool
    bounds: Bounds | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a ``Literal``."""
        return tuple(value for kind in alternatives(self.kind) for value in _literals(kind))

    def check(self, value: object) -> None:
        """Raises: ConfigError for a value of another type, not of the choices, or out of bounds."""
        if not _is_of(self.kind, value):
            *others, last = self.choices or [_name_of(kind) for kind in alternatives(self.kind)]
            allowed = f"{', '.join(others)} or {last}" if others else last
            got = "" if self.is_secret else f", got {value!r:.80}"
            raise ConfigError(f"must be {allowed}{got}.", field=self.name)
        if self.bounds is not None and isinstance(value, int | float):
            self.bounds.check(self.name, value)


def internal(default: Default) -> Default:
    """A field that is no option."""
    field: Default = dataclasses.field(default=default, metadata={"is_internal": True})
    return field


def bounded(
    default: Default,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> Default:
    """A number in a range (``Bounds``)."""
    bounds = Bounds(least, above, most, below)
    field: Default = dataclasses.field(default=default, metadata={"bounds": bounds})
    return field


def secret(default: Default) -> Default:
    """A field whose value is never shown."""
    field: Default = dataclasses.field(default=default, metadata={"is_secret": True}, repr=False)
    return field


def options_of(config: Dataclass | type[Dataclass]) -> dict[str, Option]:
    """The options of a dataclass by name. The values of an instance are the defaults."""
    cls = config if isinstance(config, type) else type(config)
    kinds = typing.get_type_hints(cls)
    help_texts = _help_texts(cls)
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if "is_internal" in field.metadata:
            continue
        default = field.default if isinstance(config, type) else getattr(config, field.name)
        if dataclasses.is_dataclass(default):
            found |= options_of(default)
        else:
            name, is_secret = field.name, "is_secret" in field.metadata
            found[name] = Option(
                name, kinds[name], default, help_texts.get(name, ""), is_secret, field.metadata.get("bounds")
            )
    return found


def with_options(config: Config | type[Config], values: Mapping[str, object]) -> Config:
    """``config`` with these values, in dataclasses that it holds too. A class is made with its defaults."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        default = field.default if isinstance(config, type) else getattr(config, field.name)
        if field.name in values:
            given[field.name] = values[field.name]
        elif dataclasses.is_dataclass(default) and not isinstance(default, type):
            given[field.name] = with_options(default, values)
    return config(**given) if isinstance(config, type) else dataclasses.replace(config, **given)


def check_types(config: Dataclass) -> None:
    """Raises: ConfigError for the first field with a value that ``Option.check`` refuses."""
    for option in options_of(config).values():
        option.check(option.default)


def without_secrets(config: Dataclass) -> dict[str, object]:
    """The fields by name, with asterisks for secrets."""
    values: dict[str, object] = dataclasses.asdict(config)
    for name, option in options_of(config).items():
        if option.is_secret and option.default:
            values[name] = ["***"] * len(option.default) if isinstance(option.default, tuple) else "***"
    return values


def spell(text: str, spelling: Callable[[str], str | None]) -> str:
    """``text`` with the names in backticks as ``spelling`` writes them; None leaves a name as it is."""
    return _NAME.sub(lambda name: spelling(name[1]) or name[0], text)


def _help_texts(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        section = _ATTRIBUTES.search(inspect.cleandoc(each.__dict__.get("__doc__") or "") + "\n")
        for entry in _ENTRY.finditer(section[1] if section else ""):
            found |= dict.fromkeys(entry[1].split(", "), " ".join(entry[2].split()))
    return found


def alternatives(kind: Any) -> tuple[object, ...]:
    """The members of a union, ``None`` last."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return tuple(sorted(members, key=lambda member: member is types.NoneType))


def _literals(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _is_of(kind: object, value: object) -> bool:
    """Whether ``value`` is of this type. Numbers may be whole where they need not; paths may be text."""
    members = alternatives(kind)
    if len(members) > 1:
        return any(_is_of(each, value) for each in members)
    if literals := _literals(kind):
        return value in literals
    if get_origin(kind) is tuple:
        return isinstance(value, (tuple, list)) and all(_is_of(get_args(kind)[0], each) for each in value)
    accepted = {float: (float, int), Path: (Path, str)}.get(typing.cast(type, kind), kind)
    return isinstance(value, typing.cast(type, accepted)) and (kind is bool or not isinstance(value, bool))


def _name_of(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {_name_of(get_args(kind)[0])}"
    return _TYPE_NAMES[kind]
