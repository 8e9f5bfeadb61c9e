"""Keywords of ``LLM`` and ``AsyncLLM``, and errors that name them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ConfigError, InvalidOption, InvalidRequest, RequestError
from backfill.core.options import options_of, spell, with_options
from backfill.protocol.options import check_template, read_template


def parse_engine_options(keywords: Mapping[str, object], callee: str) -> EngineConfig:
    """Raises: TypeError for a keyword that is no option, ConfigError for a value of the wrong type."""
    options = options_of(EngineConfig)
    unknown = sorted(keywords.keys() - options)
    if "data_parallel_size" in unknown:
        raise TypeError(
            f"{callee}() got an unexpected keyword argument 'data_parallel_size': it makes one engine. "
            "Several are started by backfill serve --data-parallel-size, or by `concurrency` of backfill.ray."
        )
    if unknown:
        near = difflib.get_close_matches(unknown[0], options, n=1)
        hint = f"did you mean {near[0]}? Options" if near else "options"
        raise TypeError(
            f"{callee}() got an unexpected keyword argument {', '.join(map(repr, unknown))}; "
            f"{hint} of the engine are {', '.join(options)}."
        )
    for name, value in keywords.items():
        options[name].check(value)
    return with_options(EngineConfig, keywords)


def signature_with_options(init: Callable[..., None]) -> inspect.Signature:
    """The signature of a class with this ``__init__``, with the engine's options by name, for ``help``."""
    signature = inspect.signature(init)
    _, *given = (each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD)
    options = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.kind
        )
        for option in options_of(EngineConfig).values()
    ]
    return signature.replace(parameters=[*given, *options])


def template_text(given: str | Path | None) -> str | None:
    """Jinja source as it is, or the source in the file of this name."""
    if isinstance(given, str) and ("{{" in given or "{%" in given):
        check_template(given)
        return given
    return read_template(None if given is None else Path(given).expanduser())


@contextmanager
def in_library_terms(where: str = "") -> Iterator[None]:
    """Errors of the layers below become this one's, and options are named as keywords.

    Args:
        where: goes before what is wrong with a request.
    """
    try:
        yield
    except RequestError as error:
        raise InvalidRequest(where + str(error), param=error.param, code=error.code) from None
    except ConfigError as error:
        raise InvalidOption(with_keywords(str(error))) from None
    except BackfillError as error:
        error.args = (with_keywords(str(error)),)
        raise


def with_keywords(message: str) -> str:
    """A message of the layers below, with options named as keywords."""
    return spell(message, lambda name: name)
