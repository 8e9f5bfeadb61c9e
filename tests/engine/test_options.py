from __future__ import annotations

from pathlib import Path

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.engine.options import check_profile
from backfill.models.config import ModelConfig
from tests.builders import make_profile
from tests.models.tiny import save_tiny_llama_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_llama_config(tmp_path)
    return tmp_path


def check(folder: Path, path: Path | None) -> None:
    check_profile(EngineConfig(model_dir=str(folder), profile=path))


def test_a_profile_of_the_model_is_good_whatever_its_device(folder: Path) -> None:
    make_profile(model=ModelConfig.from_folder(folder).shape_key).save(folder / "profile.json")
    check(folder, folder / "profile.json")
    check(folder, None)


def test_a_profile_that_cannot_serve_is_refused_without_the_model_being_loaded(folder: Path) -> None:
    make_profile().save(folder / "other.json")
    (folder / "old.json").write_text('{"format": 1}')
    (folder / "corrupt.json").write_text("{")
    for name, reason in (
        ("other", "is of another model"),
        ("old", "is not of format"),
        ("corrupt", "is not JSON"),
        ("absent", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check(folder, folder / f"{name}.json")
