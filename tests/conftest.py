from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from backfill.engine.environment import engine_environment
from tests.shared import LONG, RUN_FOLDER_VARIABLE, SHORT, made_once

# Before torch loads the libraries that read it.
os.environ.update(engine_environment(os.environ))
# Processes that are started find compiled modules beside the sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell starts a job in the background with Ctrl-C ignored, and the processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests use whatever model folders they are given; nothing may be looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from hypothesis import HealthCheck, settings

# The same examples in every run, however long one takes; --hypothesis-profile=default draws new ones.
_REPEATABLE = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(SHORT, _REPEATABLE, max_examples=50)
settings.register_profile(LONG, _REPEATABLE)
settings.load_profile(SHORT)

# Likewise the next run finds the modules of tests, which pytest takes longer to compile than to import.
sys.dont_write_bytecode = False


def _has_cuda() -> bool:
    # The process that only starts workers would take 2 s to import torch, before they start.
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return False
    import torch

    return torch.cuda.is_available()


if not _has_cuda():
    # Triton decides whether its kernels are interpreted when it is first imported, by whatever library.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# By fixture, the marker of the tests that use it.
_MARKERS = {"browser": "browser", "cluster": "ray", "postgres": "postgres", "s3": "s3"}

# Long ones that would come last: one worker would have nothing to do while another runs them.
_FIRST_FILES = ("test_documented_commands.py", "test_dependencies.py")

# Folders whose files share servers or engines: one worker runs them all, and starts each once.
_TOGETHER = ("tests/api", "tests/llm")


@pytest.fixture
def anyio_backend() -> str:
    """What runs the tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the default model, fetched on first use."""
    from backfill.models.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def small_model(default_model: Path) -> Path:
    """Folder of a random model of the default model's vocabulary, for what does not depend on the size."""
    from tests.models.tiny import save_small_model

    return made_once("small-model", lambda folder: save_small_model(folder, default_model))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection, which would look at all that is imported and collected, and stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _FIRST_FILES)
    for item in items:
        for fixture in _MARKERS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(_MARKERS[fixture])
    if shutil.which("chromium") is None and (left_out := [each for each in items if _needs_browser(each)]):
        items[:] = [each for each in items if not _needs_browser(each)]
        config.hook.pytest_deselected(items=left_out)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _ByFolder(config, log) if config.getoption("dist") == "loadfile" else None


class _ByFolder(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        folder = os.path.dirname(path)
        return folder if folder in _TOGETHER else path


def _needs_browser(item: pytest.Item) -> bool:
    return item.get_closest_marker("browser") is not None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[RUN_FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="backfill-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(RUN_FOLDER_VARIABLE), ignore_errors=True)
