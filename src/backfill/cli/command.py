"""How a command is written: a function of dataclasses, whose fields are its options.

::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PullOptions:
        \"\"\"What to fetch.

        Attributes:
            model: name of the model.
            download_dir: folder of converted models.
        \"\"\"

        model: str = DEFAULT_MODEL
        download_dir: Path | None = None

    def pull(options: PullOptions) -> None:
        \"\"\"Fetch MODEL and print its folder.\"\"\"

    app = command(pull, {"Model": ("model", "download_dir")}, positional="model")

A field's name, type and default are the option's, and its entry under ``Attributes:`` is its help
(``core/options.py``). Its rules are in ``validate()`` of its class, whose ConfigError names the field. The
default of a parameter of the function gives the command defaults of its own. ``groups`` are the sections of
``--help``; a field that is in none keeps its default. ``main.py`` names the command.

A value comes from the flag, else the environment variable (``BACKFILL_`` and the name in capitals), else the
file of ``--config``, else the default. An error names the option as the user wrote it there: the flag, the
variable, or the key of the file.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import App, Group, Parameter
from cyclopts.config import Dict

from backfill.cli.config_file import read_config
from backfill.cli.help import HelpText
from backfill.core.errors import BackfillError
from backfill.core.options import Dataclass, Option, options_of, spell, with_options

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection, Token

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_CONFIG = Option(
    "config",
    Path | None,
    None,
    "TOML or YAML file of options, named as here. An environment variable goes before it: BACKFILL_ and the "
    "option's name in capitals, such as BACKFILL_MAX_NUM_SEQS. A flag goes before both.",
    is_secret=False,
)


def command(
    function: Callable[..., None],
    groups: Mapping[str, Sequence[str]],
    *,
    positional: str | None = None,
    spellings: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
    variables: Mapping[str, str] = types.MappingProxyType({}),
) -> App:
    """A command line for ``function``.

    Args:
        function: takes dataclasses; its docstring is the command's help.
        groups: names of fields by title of the section of ``--help``.
        positional: field that may be given without its flag.
        spellings: more flags of a field, such as ``-i``; flags with ``--`` replace the field's own.
        variables: environment variable of a field beside ``BACKFILL_<FIELD>``.
    """
    return _Command(function, groups, positional, spellings, variables).app


def fail(message: object) -> typing.NoReturn:
    """End the command with exit status 1 and one line."""
    print(f"backfill: {message}", file=sys.stderr)
    raise SystemExit(1)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Command:
    """One command line; it remembers where each value came from until the function has returned."""

    def __init__(
        self,
        function: Callable[..., None],
        groups: Mapping[str, Sequence[str]],
        positional: str | None,
        spellings: Mapping[str, Sequence[str]],
        variables: Mapping[str, str],
    ) -> None:
        self._function = function
        self._configs = _configs_of(function)
        self._spellings = spellings
        self._variables = variables
        self._sources: dict[str, str] = {}
        known = {name: option for config in self._configs for name, option in options_of(config).items()}
        self._options = {name: known[name] for names in groups.values() for name in names}
        self._options["config"] = _CONFIG
        parameters = []
        for title, names in {**groups, "Configuration": ("config",)}.items():
            group = Group.create_ordered(title)
            parameters += [self._parameter(self._options[name], group, positional) for name in names]
        parameters.sort(key=lambda parameter: parameter.kind)

        signature = inspect.Signature(parameters)

        def call(*arguments: object, **values: object) -> None:
            self._call(signature.bind_partial(*arguments, **values).arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        call.__name__ = function.__name__
        self.app = App(
            default_command=call,
            help_format="plaintext",
            help_formatter=HelpText(inspect.getdoc(function), positional.upper() if positional else None),
            version_flags=(),
            config=(self._read_sources,),
        )

    def _parameter(self, option: Option, group: Group, positional: str | None) -> inspect.Parameter:
        names = (flag(option.name), *self._spellings.get(option.name, ()))
        variables = [f"BACKFILL_{option.name.upper()}"]
        variables += [self._variables[option.name]] if option.name in self._variables else []
        is_flag = option.kind is bool
        parameter = Parameter(
            name=names if len(names) == 1 or (names[1].startswith("-") and names[1][1] != "-") else names[1:],
            group=group,
            help=self._help(option),
            env_var=variables,
            show_env_var=False,
            show_default=False,
            negative=None if is_flag else (),
            allow_repeating=True,  # the last one counts, or all of a list
            allow_leading_hyphen=not is_flag and option.name != positional,
            converter=_whole_number if _kind_on_a_command_line(option.kind) is int else None,
            metavar=None if is_flag else _metavar(option),
        )
        kind = _kind_on_a_command_line(option.kind)
        is_required = option.default is MISSING
        return inspect.Parameter(
            option.name,
            _POSITIONAL if option.name == positional else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required else None,  # the configuration has the default
            annotation=Annotated[kind if is_required else kind | None, parameter],
        )

    def _help(self, option: Option) -> str:
        text = spell(option.help, lambda name: flag(name) if name in self._options else name)
        notes = []
        if option.choices:
            notes.append(f"choices: {', '.join(option.choices)}")
        if option.default not in (MISSING, None, (), "", False) and not option.is_secret:
            notes.append(f"default: {_shown(option.default)}")
        if option.name in self._variables:
            notes.append(f"variable: {self._variables[option.name]}")
        return f"{text[:1].upper()}{text[1:]}" + (f" [{'; '.join(notes)}]" if notes else "")

    def _read_sources(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the values of the configuration file. Called by cyclopts once flags and variables are read."""
        for argument in arguments:  # a variable that is empty is not set
            argument.tokens[:] = [token for token in argument.tokens if token.source != "env" or token.value]
        by_name = {argument.field_info.name: argument for argument in arguments}
        if by_name["config"].tokens:
            path = Path(by_name["config"].tokens[-1].value).expanduser()
            values = read_config(
                path, {name: each for name, each in self._options.items() if name != "config"}
            )
            Dict(values, source=str(path), use_commands_as_keys=False)(app, commands, arguments)
        self._sources = {
            name: _source(name, token.source, token.keyword)
            for name, argument in by_name.items()
            for token in argument.tokens[-1:]
        }

    def _call(self, values: Mapping[str, object]) -> None:
        try:
            configs = [with_options(config, values) for config in self._configs]
            for config in configs:
                if validate := getattr(config, "validate", None):
                    validate()
            self._function(*configs)
        except BackfillError as error:
            fail(spell(str(error), self._spelling))

    def _spelling(self, name: str) -> str | None:
        return self._sources.get(name, flag(name)) if name in self._options else None


def _configs_of(function: Callable[..., None]) -> list[Dataclass | type[Dataclass]]:
    """The dataclasses of its parameters, as the instances that are their defaults where there are some."""
    kinds = typing.get_type_hints(function)
    return [
        kinds[name] if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _source(name: str, source: str, keyword: str | None) -> str:
    """The option as the user wrote it."""
    if source == "cli":
        return flag(name)
    return str(keyword) if source == "env" else f"{name} in {source}"


def _kind_on_a_command_line(kind: Any) -> Any:
    """Without None, which no text stands for, and with text for a choice, which ``validate`` checks."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    kinds = tuple(
        str if get_origin(each) is Literal else each for each in kinds if each is not types.NoneType
    )
    return Union[kinds]  # noqa: UP007  # of types that are known when it runs


def _whole_number(kind: type[int], tokens: Sequence[Token]) -> int:
    value = tokens[-1].value
    try:
        return int(value)
    except ValueError:  # cyclopts would round 2.5
        raise ValueError(f'unable to convert "{value}" into {kind.__name__}.') from None


def _metavar(option: Option) -> str:
    """The word for a value."""
    if option.choices:
        return "CHOICE"
    kind = _kind_on_a_command_line(option.kind)
    while get_args(kind):  # the last member of a union, the items of a tuple
        kind = [each for each in get_args(kind) if each is not Ellipsis][-1]
    return str(kind.__name__.upper())


def _shown(default: object) -> str:
    if default is True:
        return "on"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
