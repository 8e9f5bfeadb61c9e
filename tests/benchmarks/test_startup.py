"""How the benchmark of the start-up ends where there is nothing to measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import served
import startup


@pytest.mark.slow
def test_a_server_that_ends_is_told_with_its_last_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no-folder"
    file.touch()
    with pytest.raises(SystemExit, match="backfill serve ended with 1"):
        startup.measure(str(file), fills=False)
    assert f"backfill: cannot use the model cache {file}/models" in capfd.readouterr().err


def test_a_model_that_is_not_in_the_cache_is_fetched_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch() -> Path:
        folder = tmp_path / "models" / "default"
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr(served, "resolve_model", fetch)
    with served.cache_without_profiles() as cache:
        assert [path.name for path in Path(cache).iterdir()] == ["models"]
        assert (Path(cache) / "models" / "default").is_dir()
