"""The page for chat and monitoring: serves its files from `page/`.

Runs in the api process. A model's text may contain anything, so the page may run only its own code and reach only this server:
the policy below makes the browser enforce that, even if the page's code has a mistake.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; media-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Handle the route: return the page, or one of its files."""
    name = request.path_params.get("name", "index.html")
    found = files().get(name)
    if found is None:
        raise HTTPException(404)
    media_type = MEDIA_TYPES[found.suffix]
    return Response(found.read_bytes(), media_type=media_type, headers=HEADERS)


@cache
def files() -> dict[str, Path]:
    """Return the files of the page by their public names."""
    return {str(file.relative_to(FOLDER)): file for file in FOLDER.rglob("*") if file.suffix in MEDIA_TYPES}
