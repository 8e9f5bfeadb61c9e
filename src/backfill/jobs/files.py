"""Files of owners: uploads, chunk by chunk, within the limits of storage, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO

from backfill.core.durable_files import write_all
from backfill.jobs.blobs import Download
from backfill.jobs.errors import Busy, NotFound, StorageFull, TooLarge, TooManyUploads
from backfill.jobs.records import FileRecord, Page, new_file_id
from backfill.jobs.storage import JobStorage

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 60.0
_GARBAGE_INTERVAL_S = 3600.0


class Files:
    """The Files API without HTTP. It counts the bytes of all uploads. One event loop owns it."""

    def __init__(self, storage: JobStorage) -> None:
        self.storage = storage
        # Bytes since the start, without those of aborted uploads.
        self._num_received = 0
        self._num_received_of: Counter[str] = Counter()
        self._num_unfinished_of: Counter[str] = Counter()  # of those, in uploads that have not ended
        self._num_open_of: Counter[str] = Counter()

    async def get(self, owner: str, file_id: str) -> FileRecord:
        """Raises: NotFound."""
        return await self.storage.read(self.storage.store.get_file, owner, file_id)

    async def list(
        self, owner: str, *, purpose: str | None, order: str, limit: int, after: str | None
    ) -> Page[FileRecord]:
        """In order of creation, ``asc`` or ``desc``. Raises: NotFound for an unknown ``after``."""
        query = self.storage.store.list_files
        return await self.storage.read(query, owner, purpose=purpose, order=order, limit=limit, after=after)

    async def delete(self, owner: str, file_id: str) -> None:
        """Raises: NotFound, Conflict while a batch that has not ended reads it."""
        await self.storage.query(self.storage.store.delete_file, owner, file_id)
        await self.storage.threads.results.run(self.storage.blobs.delete, file_id)

    async def open(self, record: FileRecord) -> Download:
        """Its contents. Raises: NotFound also where the disk has lost them."""
        threads = self.storage.threads.downloads
        try:
            return Download(await threads.run(self.storage.blobs.open, record.id), threads)
        except FileNotFoundError:
            logger.error("%s: its contents are missing from the file store", record.id)
            message = f"The contents of the file {record.id} are missing from the server's storage."
            raise NotFound(message) from None

    async def sweep(self) -> None:
        """Delete expired files at an interval, and garbage. Errors are logged."""
        clock = self.storage.clock
        # A start deletes what a crash left in a folder of this server alone.
        has_garbage = self.storage.is_shared or self.storage.blobs.is_remote
        next_garbage_s = clock.now_s()
        while True:
            try:
                await self._delete_expired()
                if has_garbage and clock.now_s() >= next_garbage_s:
                    next_garbage_s = clock.now_s() + _GARBAGE_INTERVAL_S
                    await self.storage.sweep_garbage()
            except Exception:
                logger.exception("expired files could not be deleted; trying again later")
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _delete_expired(self) -> None:
        storage = self.storage
        for file_id in await storage.query_with_retries(storage.store.delete_expired_files, storage.now()):
            try:
                await storage.threads.results.run(storage.blobs.delete, file_id)
            except OSError as error:  # the next start deletes it
                logger.error("%s: its contents cannot be deleted: %s", file_id, error.strerror or error)
            else:
                logger.info("%s: deleted, it had expired", file_id)

    # ---- Uploads ----

    async def begin_upload(self, owner: str) -> Upload:
        """Raises: StorageFull, TooManyUploads."""
        self._check_open(owner)
        self._num_open_of[owner] += 1
        try:
            return await self._begin(owner)
        except BaseException:
            self.note_ended(owner)
            raise

    async def _begin(self, owner: str) -> Upload:
        most_received, most_received_of_owner = None, None
        if self.storage.config.max_stored_bytes is not None:
            before = self._num_received
            num_stored = await self.storage.threads.uploads.run(self.storage.blobs.num_bytes)
            most_received = before + self.storage.config.max_stored_bytes - num_stored
        if self.storage.config.max_owner_bytes is not None:
            before = self._num_received_of[owner] - self._num_unfinished_of[owner]
            num_stored = await self.storage.query(self.storage.store.num_bytes_of, owner)
            most_received_of_owner = before + self.storage.config.max_owner_bytes - num_stored
        await self.check_free_space()
        file_id = new_file_id()
        try:
            with _disk_errors():
                file = await self.storage.threads.uploads.run(self.storage.blobs.create, file_id)
        except BaseException:  # the client has left; the file may have been made
            await self.storage.threads.uploads.run(self.storage.blobs.discard, file_id, None)
            raise
        return Upload(self, owner, file_id, file, most_received, most_received_of_owner)

    async def check_free_space(self) -> None:
        """Raise StorageFull where the rest of the disk is kept for results."""
        await self.storage.threads.uploads.run(self._check_free_space, 0)

    def receive(self, owner: str, num_bytes: int) -> tuple[int, int]:
        """Count bytes of an upload; negative when it is aborted. Returns: totals of all, and of the owner."""
        self._num_received += num_bytes
        self._num_received_of[owner] += num_bytes
        self._num_unfinished_of[owner] += num_bytes
        return self._num_received, self._num_received_of[owner]

    def note_ended(self, owner: str) -> None:
        """An upload is no longer open."""
        self._num_open_of[owner] -= 1
        if self._num_open_of[owner] == 0:
            del self._num_open_of[owner]

    async def write(self, file: FileIO, data: bytes | bytearray) -> None:
        with _disk_errors():
            await self.storage.threads.uploads.run(self._write, file, data)

    async def keep(self, record: FileRecord, file: FileIO) -> None:
        """Make the contents durable, then the record."""
        with _disk_errors():
            await self.storage.threads.uploads.run(self.storage.blobs.commit, record.id, file)
        try:
            await self.storage.query(self.storage.store.add_file, record)
        except (asyncio.CancelledError, Busy):
            raise  # there may be a record; if there is none, the contents are deleted as garbage
        except BaseException:
            await self.storage.threads.uploads.run(self.storage.blobs.delete, record.id)
            raise
        self._num_unfinished_of[record.owner] -= record.num_bytes

    def _check_open(self, owner: str) -> None:
        most = self.storage.config.batch_max_uploads
        most_of_owner = max(1, most // 4)
        if self._num_open_of[owner] >= most_of_owner:
            raise TooManyUploads(
                f"At most {most_of_owner} of your uploads may be open at once. Please retry."
            )
        if self._num_open_of.total() >= most:
            raise TooManyUploads(f"At most {most} uploads may be open at once. Please retry.")

    def _write(self, file: FileIO, data: bytes | bytearray) -> None:
        self._check_free_space(len(data))
        write_all(file.fileno(), data)

    def _check_free_space(self, num_bytes: int) -> None:
        least = self.storage.config.min_free_bytes
        if least > 0 and self.storage.blobs.num_free_bytes() - num_bytes < least:
            logger.warning("an upload or a batch was refused: the disk has less than %d bytes left", least)
            raise StorageFull("The server's disk is nearly full; it takes no new files and batches.")


@dataclass(slots=True, eq=False)
class Upload:
    """An open upload. End it with ``finish`` or ``abort``."""

    files: Files
    owner: str
    file_id: str
    file: FileIO
    # Limits of the bytes of all uploads, and of the owner's, since the start; None: no limit.
    most_received: int | None
    most_received_of_owner: int | None
    _num_bytes: int = 0
    _is_open: bool = True

    async def write(self, data: bytes | bytearray) -> None:
        """Raises: TooLarge beyond the limit of any file, or when the store, the owner's part of it, or the
        disk is full."""
        limit = self.files.storage.config.max_file_bytes
        self._num_bytes += len(data)
        num_received, num_received_of_owner = self.files.receive(self.owner, len(data))
        if self._num_bytes > limit:
            raise TooLarge(f"The file is over the limit of {limit} bytes.")
        if self.most_received is not None and num_received > self.most_received:
            raise TooLarge("The server's file storage is full. Delete files that are no longer needed.")
        if self.most_received_of_owner is not None and num_received_of_owner > self.most_received_of_owner:
            most = self.files.storage.config.max_owner_bytes
            raise TooLarge(
                f"Your files are limited to {most} bytes together. Delete files that are no longer needed."
            )
        await self.files.write(self.file, data)

    async def finish(self, *, filename: str, purpose: str, expires_after_s: int | None) -> FileRecord:
        """Make the file durable. Raises: TooLarge for a batch's input over its limit; it is aborted then."""
        storage = self.files.storage
        config = storage.config
        if purpose == "batch" and self._num_bytes > config.batch_max_bytes:
            await self.abort()
            raise TooLarge(f"The input file of a batch is limited to {config.batch_max_bytes} bytes.")
        if expires_after_s is None and purpose == "batch":
            expires_after_s = int(config.retention_s)
        now = storage.now()
        record = FileRecord(
            id=self.file_id,
            owner=self.owner,
            num_bytes=self._num_bytes,
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
            filename=filename,
            purpose=purpose,
        )
        await self.files.keep(record, self.file)
        self._end()
        return record

    async def abort(self) -> None:
        self.files.receive(self.owner, -self._num_bytes)
        self._num_bytes = 0
        try:
            storage = self.files.storage
            await storage.threads.uploads.run(storage.blobs.discard, self.file_id, self.file)
        finally:
            self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self.files.note_ended(self.owner)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.error("an upload cannot be written: %s", error.strerror or error)
        raise StorageFull("The server's disk cannot take the file.") from error
