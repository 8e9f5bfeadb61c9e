"""The code imports what pyproject.toml declares, and nothing else that happens to be installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.installed import ROOT, names_of, project

# Distribution and the only folder that imports it.
ELSEWHERE = {
    "triton": "kernels/triton_ops/",  # comes with torch's CUDA build, and is of use with that only
    "fsspec": "jobs/object_store.py",  # comes with the extra s3
}
PLOTS = ("bench/coserve_result.py", "cli/studies.py", "simulation/")

# Extras, and the only files or folders that import what is in them.
EXTRAS = {"plot": PLOTS, "ray": ("ray/", "parallel/ray_", "parallel/__init__.py")}


def imported_modules(path: Path) -> Iterator[str]:
    """Top-level names of what a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def imported_distributions(folder: str) -> dict[str, set[str]]:
    """By distribution, the files of a folder that import it; a module of none counts as one."""
    distributions = packages_distributions()
    own = {"backfill", "experiments", *(path.stem for path in (ROOT / folder).rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for module in set(imported_modules(path)) - own - sys.stdlib_module_names:
            for name in distributions.get(module, [module]):
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
    assert imported_distributions(folder).keys() <= installed
