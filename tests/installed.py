"""What ``make install`` installs, of the packages that are there for the tests."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
# A virtual environment has it from the start, and we need it to fetch a model.
_OF_EVERY_ENVIRONMENT = {"backfill", "pip"}

_SITECUSTOMIZE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}: make install leaves it out", name=name)

sys.meta_path.insert(0, Missing())
"""


def project() -> dict[str, Any]:
    """The table of pyproject.toml."""
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def names_of(requirements: Iterable[str]) -> set[str]:
    """Distributions, with canonical names."""
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def with_dependencies(requirements: Iterable[str]) -> set[str]:
    """The distributions asked for, and those that they need here."""
    found: set[str] = set()
    open_ones = [(Requirement(text), "") for text in requirements]
    seen: set[tuple[str, str]] = set()
    while open_ones:
        requirement, extra = open_ones.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.add(name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                open_ones += [(Requirement(text), wanted) for text in _requires(name)]
    return found


def write_blocker(folder: Path) -> None:
    """A module for PYTHONPATH, which hides what ``make install`` leaves out."""
    installed = _OF_EVERY_ENVIRONMENT | with_dependencies(
        [*project()["dependencies"], *project()["optional-dependencies"]["plot"]]
    )
    blocked = {
        module
        for module, distributions in packages_distributions().items()
        if not {canonicalize_name(name) for name in distributions} & installed
    }
    (folder / "sitecustomize.py").write_text(f"BLOCKED = {blocked!r}\n{_SITECUSTOMIZE}")


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []
