"""Run Prefect's server, restricted to this machine's own names and pages: python -m pipeline.prefect_server PORT

`prefect server start` answers any Host header. To a browser, a page of another site whose name resolves to 127.0.0.1 (DNS
rebinding) has the server's own origin; its Host header still has that site's name, and is refused here.
"""

import gc
import os
import signal
import sys
import threading

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"  # never 0.0.0.0: the password travels unencrypted and lets its holder run code here
HOST_NAMES = (HOST, "localhost")
LOGIN = "/login"
# Prefect's own login page asks the API before anybody has logged in, and says that something went wrong.
LOGIN_PAGE = b"""<!doctype html><meta charset="utf-8"><title>aerie: log in</title>
<style>body{font:16px system-ui,sans-serif;margin:20vh auto;max-width:26rem;color-scheme:light dark}
input,button{font:inherit;width:100%;padding:.5rem;margin:.4rem 0;box-sizing:border-box}</style>
<h1>aerie</h1><form><label>The whole line of the file that <code>make ui</code> names
<input name="line" type="password" placeholder="aerie:..." autocomplete="current-password" autofocus></label>
<button>Log in</button><p role="alert"></p></form>
<script>document.forms[0].onsubmit = async event => {
  event.preventDefault();
  const word = btoa(unescape(encodeURIComponent(document.forms[0].line.value.trim())));
  const answer = await fetch("/api/admin/version", {headers: {Authorization: "Basic " + word}}).catch(() => ({}));
  if (answer.ok) { localStorage.setItem("prefect-password", word); location.replace("/deployments"); }
  else document.querySelector("p").textContent =
    answer.status === 401 ? "Not this line: show the file again, and paste all of it." : "No answer: is make ui still open?";
};</script>"""
Headers = list[tuple[bytes, bytes]]
TEXT_HEADERS: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
LOGIN_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; form-action 'none'; "
    b"base-uri 'none'; frame-ancestors 'none'"
)
LOGIN_HEADERS: Headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", LOGIN_POLICY)]
API_PAGES = ("openapi.json", "docs", "oauth2-redirect", "redoc")  # of FastAPI: answered without the password


def list_origins(port: int) -> list[str]:
    """Return the origins of the server's own pages."""
    return [f"http://{name}:{port}" for name in HOST_NAMES]


class OwnPages:
    """ASGI middleware that refuses other origins' pages, since CORS hides the answer, not the effect, and the API's pages.

    It has a login page of its own.
    """

    def __init__(self, app: ASGIApp, allowed: list[str]) -> None:
        self.app = app
        self.allowed = {origin.encode() for origin in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/").rpartition("/")[2] in API_PAGES:
            await _answer(send, 404, b"Not served here")
            return
        if scope["type"] == "http" and scope["path"] == LOGIN and scope["method"] in ("GET", "HEAD"):
            await _answer(send, 200, LOGIN_PAGE, LOGIN_HEADERS)
            return
        # No Origin header: not a browser, or a page of the server itself.
        sent = {value for name, value in scope.get("headers", []) if name == b"origin"}
        if sent <= self.allowed:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "foreign origin"})
        else:
            await _answer(send, 403, b"Foreign origin")


async def _answer(send: Send, status: int, body: bytes, headers: Headers = TEXT_HEADERS) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _end_with_parent() -> None:
    """Wait until the other end of standard input is closed, as when `make ui` is killed outright, and end this process."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    port = int(sys.argv[1])
    gc.disable()  # what is imported stays; looking through it again and again takes a sixth of the time
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    if settings.api.auth_string is None:
        sys.exit("aerie: PREFECT_SERVER_API_AUTH_STRING is not set; `make ui` sets it")
    # Both checks wrap the app and are not added to it, since Prefect's services call the same app in memory, under a host name
    # of their own. A preflight of a foreign origin is answered by OwnPages; Prefect's CORS has the same list (pipeline/serve.py).
    own_pages = OwnPages(create_app(final=True), list_origins(port))
    app = TrustedHostMiddleware(own_pages, allowed_hosts=HOST_NAMES, www_redirect=False)
    gc.enable()
    gc.freeze()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvicorn.run(
        app,
        host=HOST,
        port=port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )


if __name__ == "__main__":
    main()
