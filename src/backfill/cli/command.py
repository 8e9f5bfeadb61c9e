"""How a command is written: a function of dataclasses, whose fields are its options.

``pull.py`` is the shortest one. A field's name, type and default are the option's, and its entry under
``Attributes:`` is its help (``core/options.py``). Its rules are in ``validate()`` of its class, whose
ConfigError names the field. The default of a parameter of the function gives the command defaults of its own.
``groups`` are the sections of ``--help``; a field that is in none keeps its default. ``main.py`` names the
command.

A value comes from the flag, else the environment variable (``BACKFILL_`` and the name in capitals), else the
file of ``--config``, else the default. An error names the option as the user wrote it there: the flag, the
variable, or the key of the file.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from cyclopts import App, Group, Parameter
from cyclopts.config import Dict

from backfill.cli.config_file import read_config
from backfill.core.errors import BackfillError
from backfill.core.options import Dataclass, Option, alternatives, options_of, spell, with_options

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection, Token

# Sections of ``--help`` that several commands have.
MODEL_SECTION = (
    "model revision served_model_name dtype quantization load_format max_model_len chat_template "
    "tool_call_parser reasoning_parser generation_config"
)
LIMITS_SECTION = "max_num_seqs max_num_batched_tokens max_prefill_chunk_tokens"
ADDRESS_SECTION = "host port uds ssl_certfile ssl_keyfile root_path allowed_hosts allowed_origins"
BATCHES_SECTION = (
    "order batch_api batch_database_url batch_file_store batch_lease_timeout batch_max_lines batch_max_bytes "
    "batch_max_storage_gib batch_max_owner_gib batch_min_free_gib batch_max_uploads batch_max_open "
    "batch_max_queued_lines batch_retention_hours"
)
# Environment variables with names of their own, by option.
VARIABLES = {
    "kv_gib": "BACKFILL_CPU_KVCACHE_SPACE",
    "log_level": "BACKFILL_LOGGING_LEVEL",
    "download_dir": "BACKFILL_CACHE_ROOT",
}

# Similarity from which a variable counts as another one misspelt.
_MISSPELT = 0.93
HELP_ALL = "--help-all"  # cyclopts has no value for --help, so main.py makes this of `--help all`
_MORE = "These are the options that are needed first; --help all lists all {}."
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_CONFIG = Option(
    "config",
    Path | None,
    None,
    "TOML or YAML file of this command's options, named as here. An environment variable goes before it: "
    "{prefix} and the option's name in capitals, such as {example}. A flag goes before both.",
    is_secret=False,
)


def command(
    function: Callable[..., None],
    groups: Mapping[str, str],
    *,
    positional: str = "",
    spellings: Mapping[str, str] = types.MappingProxyType({}),
    variables: Mapping[str, str] = types.MappingProxyType({}),
    many: str = "",
    first: str = "",
    prefix: str = "BACKFILL_",
) -> App:
    """A command line for ``function``.

    Args:
        function: takes dataclasses; its docstring is the command's help.
        groups: names of fields, separated by spaces, by title of the section of ``--help``.
        positional: field that may be given without its flag.
        spellings: flags of a field beside its own, separated by spaces, such as ``-i``.
        variables: environment variable of a field beside the one with ``prefix``.
        many: names of fields that take several values after one flag, as in ``--engines URL URL``.
        first: names of fields that ``--help`` shows; the others have ``--help all``. By default all.
        prefix: of the environment variables. Commands that measure have their own, so that what is set for a
            server does not change them.
    """
    made = _Command(function, groups, positional, spellings, variables, many.split(), prefix)
    return made.app(first.split())


@dataclass(slots=True)
class _Command:
    """One command line; it remembers where each value came from until the function has returned."""

    _function: Callable[..., None]
    _groups: Mapping[str, str]
    _positional: str
    _spellings: Mapping[str, str]
    _variables: Mapping[str, str]
    _many: Sequence[str]
    _prefix: str
    _configs: list[Dataclass | type[Dataclass]] = field(init=False)
    _options: dict[str, Option] = field(init=False)
    _sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._configs = _configs_of(self._function)
        known = {name: option for config in self._configs for name, option in options_of(config).items()}
        self._options = {name: known[name] for names in self._groups.values() for name in names.split()}

    def app(self, first: Sequence[str] = ()) -> App:
        parameters = [
            self._parameter(self._options[name], group, is_shown=not first or name in first)
            for title, names in self._groups.items()
            for group in (Group.create_ordered(title),)
            for name in names.split()
        ]
        parameters.append(self._parameter(_CONFIG, Group.create_ordered("Configuration")))
        signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

        def call(*arguments: object, **values: object) -> None:
            self._call(signature.bind_partial(*arguments, **values).arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        call.__name__ = self._function.__name__
        about = _paragraphs(inspect.getdoc(self._function) or "")
        app = App(
            default_command=call,
            help_format="plaintext",
            help_epilogue=f"{about}\n\n{_MORE.format(len(parameters))}" if first else about,
            version_flags=(),
            config=(self._read_sources,),
        )
        if first:
            everything = self.app()
            everything.usage, everything.help_flags = "", ()
            app.command(lambda: everything.help_print([]), name=HELP_ALL, config=(), show=False)
        return app

    def _flags(self, name: str) -> tuple[str, ...]:
        return (_flag(name), *self._spellings.get(name, "").split())

    def _parameter(self, option: Option, group: Group, *, is_shown: bool = True) -> inspect.Parameter:
        kind = _kind_of_text(option.kind)
        names = self._flags(option.name)
        is_positional, is_flag = option.name == self._positional, kind is bool
        is_many = option.name in self._many
        parameter = Parameter(
            name=names,
            group=group,
            show=is_shown,
            help=self._help(option),
            env_var=self._variables_of(option),
            show_env_var=False,
            show_default=False,
            negative=None if is_flag and not any(name.startswith("--no-") for name in names) else (),
            allow_repeating=True,  # the last one counts, or all of a list
            allow_leading_hyphen=not (is_flag or is_positional or is_many),
            consume_multiple=is_many,
            converter={int: _whole_number, int | str: _whole_number_or_text}.get(kind),
            metavar="CHOICE" if option.choices else None,
        )
        is_required = option.default is MISSING
        return inspect.Parameter(
            option.name,
            _POSITIONAL if is_positional else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required else None,  # the configuration has the default
            annotation=Annotated[kind if is_required else kind | None, parameter],
        )

    def _help(self, option: Option) -> str:
        text = spell(option.help, lambda name: _flag(name) if name in self._options else name)
        if option is _CONFIG:
            text = text.format(prefix=self._prefix, example=self._prefix + next(iter(self._options)).upper())
        notes = []
        if option.choices:
            notes.append(f"choices: {', '.join(option.choices)}")
        is_set = option.default not in (MISSING, None, (), "") and option.default is not False
        if is_set and not option.is_secret:
            notes.append(f"default: {_shown(option.default)}")
        if option.name in self._variables:
            notes.append(f"variable: {self._variables[option.name]}")
        return f"{text[:1].upper()}{text[1:]}" + (f" [{'; '.join(notes)}]" if notes else "")

    def _variables_of(self, option: Option) -> tuple[str, ...]:
        if option is _CONFIG:
            return ()  # one variable would name the same file for all commands, whose options differ
        return (self._prefix + option.name.upper(), *self._variables.get(option.name, "").split())

    def _read_sources(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the values of the configuration file. Called by cyclopts once flags and variables are read."""
        for argument in arguments:
            argument.tokens[:] = [token for token in argument.tokens if not _is_unset(token)]
        by_name = {argument.field_info.name: argument for argument in arguments}
        if tokens := by_name["config"].tokens:
            path = Path(tokens[-1].value).expanduser()
            named = {
                flag.lstrip("-").replace("-", "_"): option
                for name, option in self._options.items()
                for flag in self._flags(name)
            }
            values = read_config(path, named)
            Dict(values, source=str(path), use_commands_as_keys=False)(app, commands, arguments)
        self._sources = {
            name: _source(name, argument.tokens[-1]) for name, argument in by_name.items() if argument.tokens
        }
        self._name_misspelt_variables()

    def _name_misspelt_variables(self) -> None:
        """Say which variables set nothing here and look like one of this command's."""
        known = {name for option in self._options.values() for name in self._variables_of(option)}
        ours = {name for name in os.environ if name.startswith(self._prefix)}
        for name in sorted(ours - known):
            swapped = [each for each in known if sorted(each) == sorted(name)]
            if near := swapped or difflib.get_close_matches(name, known, 1, _MISSPELT):
                wrong = f"{name} is no variable of this command. Did you mean {near[0]}?"
                print(f"backfill: {wrong}", file=sys.stderr)

    def _call(self, values: Mapping[str, object]) -> None:
        try:
            configs = [with_options(config, values) for config in self._configs]
            for config in configs:
                if validate := getattr(config, "validate", None):
                    validate()
            self._function(*configs)
        except BackfillError as error:
            print(f"backfill: {spell(str(error), self._spelling)}", file=sys.stderr)
            raise SystemExit(1) from None

    def _spelling(self, name: str) -> str | None:
        """The option as the user wrote it; None for what is not an option of this command."""
        return self._sources.get(name, _flag(name)) if name in self._options else None


def _configs_of(function: Callable[..., None]) -> list[Dataclass | type[Dataclass]]:
    """The dataclasses that the function takes: instances where its parameters have defaults, else classes."""
    kinds = typing.get_type_hints(function)
    return [
        kinds[name] if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_unset(token: Token) -> bool:
    """A variable that is empty, or that Kubernetes sets for a Service named backfill."""
    return token.source == "env" and (not token.value or token.value.startswith("tcp://"))


def _source(name: str, token: Token) -> str:
    """The option as the user wrote it."""
    if token.source == "cli":
        return _flag(name)
    return str(token.keyword) if token.source == "env" else f"{name} in {token.source}"


def _kind_of_text(kind: object) -> Any:
    """The type that text is converted to: without None, and text for a choice, which ``validate`` checks."""
    kinds = [each for each in alternatives(kind) if each is not types.NoneType]
    return functools.reduce(operator.or_, (str if get_origin(each) is Literal else each for each in kinds))


def _whole_number(kind: type[int], tokens: Sequence[Token]) -> int:
    value = tokens[-1].value
    try:
        return int(value)
    except ValueError:  # cyclopts would round 2.5
        raise ValueError(f'unable to convert "{value}" into {kind.__name__}.') from None


def _whole_number_or_text(kind: object, tokens: Sequence[Token]) -> int | str:
    """Of options that check their text themselves, such as ``4k``. Here too cyclopts would round 2.5."""
    value = tokens[-1].value
    try:
        return int(value)
    except ValueError:
        return value


def _shown(default: object) -> str:
    if default is True:
        return "on"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
