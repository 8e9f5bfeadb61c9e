"""Responses with the contents of a file, or one range of them (RFC 9110, section 14)."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from backfill.http.streaming import until_disconnect
from backfill.jobs.blobs import Download

logger = logging.getLogger(__name__)

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class DownloadResponse(Response):
    """Sends a download in chunks and closes it.

    Starlette's FileResponse reads in a shared pool of threads, which the process joins when it ends. A hung
    disk would block the pool's other users and the end of the process.

    Args:
        byte_range: the request's Range header; it is ignored unless it is one valid range.
    """

    def __init__(self, download: Download, filename: str, byte_range: str | None) -> None:
        size = download.num_bytes
        wanted = None if byte_range is None else parse_range(byte_range, size)
        self._download = download
        self._start, self._end = wanted or (0, size)
        name = quote(filename)
        headers = {
            "accept-ranges": "bytes",
            "content-disposition": f"attachment; filename*=utf-8''{name}"
            if name != filename
            else f'attachment; filename="{name}"',
            "content-length": str(self._end - self._start),
        }
        status = 200
        if wanted is not None and self._start < self._end:
            status = 206
            headers["content-range"] = f"bytes {self._start}-{self._end - 1}/{size}"
        elif wanted is not None:
            status = 416
            headers["content-range"] = f"bytes */{size}"
        super().__init__(None, status, headers, "application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.ensure_future(until_disconnect(receive))
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async with aclosing(self._download.chunks(self._start, self._end)) as chunks:
                async for chunk in chunks:
                    if disconnect.done():
                        return
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except OSError as error:  # the response is incomplete, so its connection is closed
            logger.error("a download was interrupted: %s", error.strerror or error)
        finally:
            disconnect.cancel()
            await self._download.close()


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """[start, end) of one range, empty if it lies beyond the file; None if the header is to be ignored."""
    found = _RANGE.fullmatch(header.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # a suffix range: the last bytes of the file
        return max(0, size - int(found[2])), size
    start, end = int(found[1]), size
    if found[2]:
        if int(found[2]) < start:
            return None
        end = min(size, int(found[2]) + 1)
    return min(start, size), end
