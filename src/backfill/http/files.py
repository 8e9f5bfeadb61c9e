"""The routes of ``/v1/files``."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from backfill.core.errors import RequestError
from backfill.http.bodies import BodyBudget, check_announced_size, owner_of, query_limit
from backfill.http.downloads import DownloadResponse
from backfill.http.multipart import MAX_OVERHEAD_BYTES, FileStart, FormField, read_form
from backfill.http.openapi import answers, takes_upload
from backfill.jobs.files import Upload
from backfill.jobs.manager import JobManager
from backfill.jobs.records import FileRecord
from backfill.protocol.batches import (
    DEFAULT_EXPIRY_ANCHOR,
    FILE_PURPOSES,
    check_expiry_s,
    check_purpose,
    clean_filename,
)
from backfill.protocol.shapes import Json

_MAX_PAGE = 10_000


class HasJobs(Protocol):
    """What the routes of files and batches need: a server's state, or a router's."""

    @property
    def bodies(self) -> BodyBudget: ...
    @property
    def jobs(self) -> JobManager | None:
        """None if the Batch API is switched off."""
        ...

    def ready_jobs(self) -> JobManager:
        """Raises: Unavailable."""
        ...


def build_files_router(state: HasJobs) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/files", openapi_extra=takes_upload())
    async def upload(request: Request) -> Json:
        """Upload a file."""
        jobs = state.ready_jobs()
        check_announced_size(request, jobs.config.max_file_bytes + MAX_OVERHEAD_BYTES)
        async with _Receiver(jobs, owner_of(request)) as receiver:
            content_type = request.headers.get("content-type", "")
            async with aclosing(read_form(request.stream(), content_type)) as events:
                async for event in events:
                    await receiver.take(event)
            return file_body(await receiver.finish())

    @router.get("/v1/files")
    async def list_files(request: Request) -> Response:
        """List files."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order[:40]!r}.", param="order")
        purpose = query.get("purpose")
        if purpose is not None and purpose not in FILE_PURPOSES:
            raise RequestError(
                f"purpose must be one of {', '.join(FILE_PURPOSES)}, got {purpose[:40]!r}.", param="purpose"
            )
        page = await state.ready_jobs().files.list(
            owner_of(request),
            purpose=purpose,
            order=order,
            limit=query_limit(request, default=_MAX_PAGE, maximum=_MAX_PAGE),
            after=query.get("after"),
        )
        return json_list([file_body(record) for record in page.items], has_more=page.has_more)

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Json:
        """Retrieve a file's name, size and purpose."""
        return file_body(await state.ready_jobs().files.get(owner_of(request), file_id))

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Json:
        """Delete a file."""
        await state.ready_jobs().files.delete(owner_of(request), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.get(
        "/v1/files/{file_id}/content",
        response_class=Response,
        responses=answers("application/octet-stream"),
    )
    async def content(request: Request, file_id: str) -> Response:
        """Download a file, or one range of it."""
        jobs = state.ready_jobs()
        record = await jobs.files.get(owner_of(request), file_id)
        download = await jobs.files.open(record)
        return DownloadResponse(download, record.filename, request.headers.get("range"))

    return router


def file_body(record: FileRecord) -> Json:
    """OpenAI's File object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def json_list(data: list[Json], *, has_more: bool) -> Response:
    """OpenAI's list object; clients get the next page with ``after=last_id``.

    Encoded here: FastAPI would block the event loop for half a second with a page of 10,000 files.
    """
    body = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


@dataclass(slots=True)
class _Receiver:
    """One upload, from form events in any order. It is deleted if the block is left before ``finish``."""

    _jobs: JobManager
    _owner: str
    _fields: dict[str, str] = field(default_factory=dict)
    _filename: str = ""
    _upload: Upload | None = None
    _is_finished: bool = False

    async def __aenter__(self) -> _Receiver:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._upload is not None and not self._is_finished:
            await self._upload.abort()

    async def take(self, event: FormField | FileStart | bytearray) -> None:
        """Raises: RequestError, TooLarge."""
        match event:
            case FormField():
                self._fields[event.name] = event.value
                if event.name == "purpose":
                    check_purpose(event.value)
                    if event.value == "batch":
                        self._jobs.on_batch_upload()
            case FileStart():
                if event.name != "file" or self._upload is not None:
                    raise RequestError("Send one file, in the form field 'file'.", param="file")
                self._filename = event.filename
                if "purpose" in self._fields:  # it may also come after the file
                    clean_filename(self._filename, self._fields["purpose"])
                self._upload = await self._jobs.files.begin_upload(self._owner)
            case bytearray():
                assert self._upload is not None
                await self._upload.write(event)

    async def finish(self) -> FileRecord:
        """Raises: RequestError, TooLarge."""
        if self._upload is None:
            raise _missing("file")
        if "purpose" not in self._fields:
            raise _missing("purpose")
        purpose = self._fields["purpose"]
        record = await self._upload.finish(
            filename=clean_filename(self._filename, purpose),
            purpose=purpose,
            expires_after_s=self._expires_after_s(),
        )
        self._is_finished = True
        return record

    def _expires_after_s(self) -> int | None:
        anchor = self._fields.get("expires_after[anchor]")
        seconds = self._fields.get("expires_after[seconds]")
        others = [name for name in self._fields if name.startswith("expires_after")]
        if anchor is None and seconds is None:
            if others:
                raise RequestError(
                    f"{others[0]} must be two fields, expires_after[anchor] and expires_after[seconds].",
                    param="expires_after",
                )
            return None
        if anchor != DEFAULT_EXPIRY_ANCHOR:
            raise RequestError(
                f"expires_after.anchor must be {DEFAULT_EXPIRY_ANCHOR}, got {anchor!r}.",
                param="expires_after",
            )
        if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
            raise RequestError(
                f"expires_after.seconds must be a number, got {seconds!r}.", param="expires_after"
            )
        check_expiry_s(int(seconds), "expires_after")
        return int(seconds)


def _missing(name: str) -> RequestError:
    return RequestError(
        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )
