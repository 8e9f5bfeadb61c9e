"""Packed layers in one file, from which they are read past the page cache.

The file is a header of one page (JSON, then zeros), then the buffers of all layers, each a whole number of
pages: what direct reads (O_DIRECT) need. It is a cache, written once under a temporary name.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from backfill.core.config import GIB
from backfill.core.errors import ConfigError, ModelError
from backfill.models.movable import PAGE_BYTES, MovableWeights, allocate_buffers

logger = logging.getLogger(__name__)

_MAGIC = "backfill packed layers"
_VERSION = 1
_BUFFERED_BYTES = 64 << 20  # written before they are flushed and dropped from the page cache


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """What a file of packed layers must hold.

    Attributes:
        source: digest of where the weights come from.
        layout: of each layer (``MovableWeights.layout``).
    """

    source: str
    layout: str
    num_layers: int
    layer_bytes: int

    @property
    def file_bytes(self) -> int:
        return PAGE_BYTES + self.num_layers * self.layer_bytes

    def header(self) -> bytes:
        text = json.dumps({"magic": _MAGIC, "version": _VERSION, **asdict(self)}).encode()
        assert len(text) <= PAGE_BYTES
        return text.ljust(PAGE_BYTES, b"\0")


class PackedFile:
    """A complete file of packed layers, open for reading. Reads may be made from any thread.

    Where the file system has no direct reads, what is read is dropped from the page cache after each layer.
    """

    def __init__(self, path: Path, form: PackedFormat) -> None:
        self.form = form
        self._path = path
        try:
            self._file, self.is_direct = os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file, self.is_direct = os.open(path, os.O_RDONLY), False
            logger.warning("%s has no direct reads: each layer passes through the page cache", path)

    def read(self, index: int, buffer: Tensor, start: int = 0, stop: int | None = None) -> None:
        """Fill ``buffer``, page-aligned uint8 ``[layer_bytes]``, with a layer, or a part of it.

        Args:
            start, stop: the part, at pages.
        Raises: OSError.
        """
        view = buffer.numpy().data[start:stop]
        offset = PAGE_BYTES + index * self.form.layer_bytes + start
        done = 0
        while done < len(view):
            num_read = os.preadv(self._file, [view[done:]], offset + done)
            if num_read == 0:
                raise OSError(errno.EIO, f"{self._path} ends before layer {index} does")
            done += num_read
        if not self.is_direct:
            os.posix_fadvise(self._file, offset, len(view), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


def packed_file(
    path: Path, form: PackedFormat, first: MovableWeights, load: Callable[[int], MovableWeights]
) -> PackedFile:
    """The file at ``path``, written if it is not there or is another one.

    Processes that want the same file wait for the first to write it.

    Args:
        first: layer 0; a file with another one is of other weights and is replaced.
        load: loads a layer.
    Raises: ConfigError if there is no space or a layer is stored in another format than the first,
        ModelError if the file cannot be written or read.
    """
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not _is_complete(path, form, first):
                for leftover in path.parent.glob(f".{path.name}.tmp-*"):  # of a process that ended
                    leftover.unlink(missing_ok=True)
                logger.info("writing packed layers to %s: %.2f GiB", path, form.file_bytes / GIB)
                _write(path, form, (load(index) for index in range(form.num_layers)))
            return PackedFile(path, form)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"keeps weights in a file of {form.file_bytes / GIB:.2f} GiB, and {path.parent} has no space "
                "for it: make some, let BACKFILL_CACHE_ROOT name another folder, or use none.",
                field="offload_interval",
            ) from error
        raise ModelError(f"packed weights cannot be kept in {path}: {error.strerror or error}") from error


def layers_differ() -> ConfigError:
    """Layers exchange buffers."""
    return ConfigError(
        "needs layers that are stored alike, and some are in other formats than the first: "
        "use `quantization` int8, int4 or none.",
        field="offload_interval",
    )


def _is_complete(path: Path, form: PackedFormat, first: MovableWeights) -> bool:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != form.file_bytes or file.read(PAGE_BYTES) != form.header():
                return False
    except FileNotFoundError:
        return False
    expected, stored = allocate_buffers(2, form.layer_bytes, torch.device("cpu"))
    first.copy_to(expected)
    packed = PackedFile(path, form)
    try:
        packed.read(0, stored)
    finally:
        packed.close()
    return torch.equal(expected, stored)


def _write(path: Path, form: PackedFormat, layers: Iterable[MovableWeights]) -> None:
    (buffer,) = allocate_buffers(1, form.layer_bytes, torch.device("cpu"))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.posix_fallocate(descriptor, 0, form.file_bytes)  # fails before anything is packed
            file.write(form.header())
            flushed = 0
            for layer in layers:
                if layer.layout() != form.layout:
                    raise layers_differ()
                layer.copy_to(buffer)
                file.write(buffer.numpy().data)
                offset = file.tell()
                if offset - flushed >= _BUFFERED_BYTES or offset == form.file_bytes:
                    file.flush()
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, flushed, offset - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = offset
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
