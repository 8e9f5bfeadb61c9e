"""The page at ``/``: a chat, the live view of co-serving, batches. Its scripts ask the public API alone."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NAMES = ("page.css", "api.js", "batches.js", "chart.js", "chat.js", "live.js", "metrics.js", "page.js")
# Nothing from elsewhere, no script or style within the text, and in no other page's frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # another version of the server has other scripts
    "X-Content-Type-Options": "nosniff",
}
# They need no key: what they show is asked for with one.
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _NAMES)})


def build_page_router() -> APIRouter:
    """The page, read once."""
    router = APIRouter(include_in_schema=False)
    _add_file(router, "/", "index.html")
    for name in _NAMES:
        _add_file(router, f"/page/{name}", name)
    return router


def _add_file(router: APIRouter, path: str, name: str) -> None:
    content = files(__name__).joinpath(name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    @router.get(path)
    async def file() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)
