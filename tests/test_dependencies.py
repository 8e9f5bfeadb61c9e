"""The code imports what pyproject.toml declares, and nothing else that happens to be installed."""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.installed import ROOT, names_of, project

# One module a line, as ruff has them.
IMPORT = re.compile(r"^ *(?:import (\w+)[\w.]*(?: as \w+)?(?: *#.*)?|from (\w+)[\w.]* import .*)$", re.M)

# Distribution and the only folder that imports it.
ELSEWHERE = {
    "triton": "kernels/triton_ops/",  # comes with torch's CUDA build, and is of use with that only
    "fsspec": "jobs/object_store.py",  # comes with the extra s3
}
# Modules that many distributions share, by the one that stands for them.
NAMESPACES = {"opentelemetry": ["opentelemetry-sdk"]}
PLOTS = ("bench/coserve_result.py", "cli/studies.py", "simulation/")

# Extras, and the only files or folders that import what is in them.
EXTRAS = {
    "otel": ("api/tracing.py",),
    "plot": PLOTS,
    "ray": ("ray/", "parallel/ray_", "parallel/__init__.py"),
}


def imported_modules(path: Path) -> Iterator[str]:
    """Top-level names of what a file imports, wherever in it. To parse all files would take seconds."""
    for match in IMPORT.finditer(path.read_text()):
        yield match[1] or match[2]


# Both look into every package that is installed.
distributions_of_modules = functools.cache(packages_distributions)


@functools.cache
def needs_of(name: str) -> list[Requirement]:
    """What a distribution says that it needs; nothing where this machine has none of the name."""
    try:
        return [Requirement(each) for each in requires(name) or ()]
    except PackageNotFoundError:
        return []


@functools.cache
def imported_distributions(folder: str) -> dict[str, set[str]]:
    """By distribution, the files of a folder that import it; a module of none counts as one."""
    distributions = distributions_of_modules()
    own = {"backfill", "experiments", "tests", *(path.stem for path in (ROOT / folder).rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for module in set(imported_modules(path)) - own - sys.stdlib_module_names:
            for name in NAMESPACES.get(module) or distributions.get(module, [module]):
                found.setdefault(canonicalize_name(name), set()).add(str(path.relative_to(ROOT / folder)))
    return found


def test_the_package_imports_only_what_is_declared() -> None:
    declared = names_of(project()["dependencies"])
    optional = project()["optional-dependencies"]
    allowed = {name: places for extra, places in EXTRAS.items() for name in names_of(optional[extra])}
    allowed |= {name: (place,) for name, place in ELSEWHERE.items()}
    for name, files in imported_distributions("src/backfill").items():
        if name not in declared:
            places = allowed.get(name, ())
            assert all(file.startswith(places) for file in files), f"{name} is imported by {files}"


def test_what_is_declared_is_imported() -> None:
    declared = names_of(project()["dependencies"])
    assert declared <= imported_distributions("src/backfill").keys()


def test_starlette_is_new_enough_for_private_networks() -> None:
    (starlette,) = (each for each in map(Requirement, project()["dependencies"]) if each.name == "starlette")
    assert "0.51.0" in starlette.specifier  # the first whose CORSMiddleware has allow_private_network
    assert "0.50.0" not in starlette.specifier


@pytest.mark.parametrize("folder", ["benchmarks", "experiments"])
def test_what_is_beside_the_package_needs_no_more_than_make_install(folder: str) -> None:
    installed = names_of([*project()["dependencies"], *project()["optional-dependencies"]["plot"]])
    found = imported_distributions(folder)
    # Clients of the API and llama.cpp have environments of their own; what validates schemas needs
    # `make install-dev`.
    elsewhere = {"clients.py", "llama_batch.py", "schema_gaps.py", "schema_suites.py"}
    assert {name for name, files in found.items() if not files <= elsewhere} <= installed


def locked(python: str) -> dict[str, Requirement]:
    """What constraints.txt has for a Python, on this platform."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    found = [pin for pin in pins if applies(pin, python)]
    by_name = {canonicalize_name(pin.name): pin for pin in found}
    assert len(by_name) == len(found), "one version of each"
    return by_name


def applies(requirement: Requirement, python: str, extra: str = "") -> bool:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra})


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_version_that_make_installs_is_locked(python: str) -> None:
    """Also of what the packages need themselves, as far as this machine has them; within the ranges."""
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    extras = [each for some in project()["optional-dependencies"].values() for each in some]
    pins = locked(python)
    ours = [Requirement(each) for each in (*builds, *project()["dependencies"], *extras)]
    todo = [*ours, Requirement("cmake"), Requirement("ninja")]
    seen = set[str]()
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen or not any(applies(wanted, python, extra) for extra in ("", *wanted.extras)):
            continue
        seen.add(str(wanted))
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None, f"{wanted}: run make lock UPGRADE="
        ((operator, version),) = ((each.operator, each.version) for each in pin.specifier)
        assert operator == "=="
        if wanted in ours:
            assert wanted.specifier.contains(version), f"{wanted} is locked to {version}"
        todo += [
            each
            for each in needs_of(wanted.name)
            if any(applies(each, python, extra) for extra in ("", *wanted.extras))
        ]
    assert len(seen) > 100
