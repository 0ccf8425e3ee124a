"""The reports of this workspace and of its runs, over HTTP: read-only, behind links that only Prefect's pages show.

    /report/KEY/main/index.html        results/report of this workspace
    /report/KEY/RUN/index.html         that of a run's own workspace, .scratch/runs/RUN

Browsers refuse `file://` links in pages of a server. A link cannot carry the password, which Prefect's pages keep in the
browser's storage and send as a header, so its KEY is derived from the password: only users who have logged in are shown it,
and it opens reports and nothing else. A browser sandboxes the pages: their scripts reach neither that storage nor
the server.
"""

import hashlib
import hmac
import os
import re
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/report/"
MAIN = "main"  # the names of runs' workspaces end with a run's id, so none is this
FOLDER = Path("results/report")
INDEX = "index.html"
RUNS_FOLDER = Path(".scratch/runs")  # as pipeline/workspaces.py, which imports DVC
RUN_NAME = re.compile(r"[A-Za-z0-9_-]+")
HEADERS = {
    # An origin of its own, so without Prefect's storage; nothing is loaded from, or sent to, anywhere.
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the address holds the key
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache, private",
}
UNKNOWN_KEY = (
    "Open the report by its link in Prefect's pages: a run's artifact `report`. The key in this address is another one."
)
NO_REPORT = (
    "There is no report here: the run has made none yet, or its workspace was dropped, or a link leads out of it."
)


def derive_key(password: str) -> str:
    """Return the part of a report's address that stands for the password, from which the password cannot be computed."""
    return hmac.new(password.encode(), b"aerie report", hashlib.sha256).hexdigest()


def build_path(password: str, workspace: str = MAIN) -> str:
    """Return the URL path of the report of a workspace: this one, or a run's."""
    return f"{PREFIX}{derive_key(password)}/{workspace}/{INDEX}"


def locate_report(root: Path, workspace: str) -> Path | None:
    """Return the folder of a report below `root`; None if it does not exist, or a symbolic link leads to it."""
    if not RUN_NAME.fullmatch(workspace):
        return None
    folder = root.resolve() / (FOLDER if workspace == MAIN else RUNS_FOLDER / workspace / FOLDER)
    return folder if folder.is_dir() and Path(os.path.realpath(folder)) == folder else None


class ReportPages:
    """ASGI middleware that answers requests below PREFIX from the report folders, and passes others on."""

    def __init__(self, app: ASGIApp, password: str, root: Path) -> None:
        self.app, self._root = app, root
        self._key = derive_key(password).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        response = await self._answer(scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        key, _, rest = scope["path"].removeprefix(PREFIX).partition("/")
        if not hmac.compare_digest(key.encode(), self._key):
            return PlainTextResponse(UNKNOWN_KEY, 403)
        workspace, _, name = rest.partition("/")
        if (folder := locate_report(self._root, workspace)) is None:
            return PlainTextResponse(NO_REPORT, 404)
        try:  # refuses other methods, names that lead out of the folder, and symbolic links that do
            return await StaticFiles(directory=folder).get_response(os.path.normpath(name or INDEX), scope)
        except HTTPException as error:
            return PlainTextResponse(NO_REPORT if error.status_code == 404 else error.detail, error.status_code)
