"""`redline.serve`: the history as web pages, read-only, with live progress as server-sent events.

Viewers do not disturb a measurement: pages come from read-only transactions and are made once for all who ask in the same
second, one task looks at the history for all viewers together, and telemetry is what the measuring process has written down.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import urlsplit

from redline.api.history import HistoryFilters, history, latest, record_and_row
from redline.api.serve_state import Live, Looker
from redline.api.workspace import Workspace
from redline.model.errors import Exit, MissingExtra, RedlineError, StoreError, UsageError
from redline.model.settings import WAY, setting
from redline.show.contents import contents_of
from redline.show.dashboard import dashboard, dashboard_policy
from redline.show.history import detail
from redline.show.report import result_of as report_of
from redline.show.serve import PAGE_POLICY, LiveState, page, picture_of, start_page, static_file
from redline.show.terminal import as_text
from redline.system.processes import give_way
from redline.verbs.compare import compare
from redline.verbs.verb import verb

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

COOKIE = "redline"
MOST_VIEWERS = 200
REPORTED = 500
"""How many of the latest records the served report has; `redline report` writes one of all."""
LONGEST_URL = 4096
LONGEST_HEADERS = 16384
FRESH_S = 1.0
"""How long a page is served again before it is made anew."""
WATCHED_FRESH_S = 5.0
"""The same while somebody watches: what was made before a record began or ended is then forgotten at once."""
SLOWEST_REQUEST_S = 10.0
"""For the head of a request to arrive: who sends it byte by byte holds a connection no longer than this."""
STUCK_MS = 60_000
"""A viewer who takes nothing for so long is disconnected, where the system can tell."""
MAKERS = 2
"""Pages that are made at the same time."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


Words: TypeAlias = Mapping[str, str]


class Access:
    """Who may look: on another address than loopback, those who know the token."""

    def __init__(self, host: str, token: str | None = None, names: tuple[str, ...] = ()) -> None:
        self.token = token
        self.names = {name.lower().strip("[]") for name in (*LOOPBACK_NAMES, host, *names)}

    def knows(self, given: str | None) -> bool:
        if self.token is None:
            return True
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def refusal(self, method: str, headers: Any, path: str) -> tuple[int, str] | None:
        """Status and reason, for a request that is not answered."""
        if method not in ("GET", "HEAD"):
            return 405, "read-only: only GET is answered"
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "a request has no body here"
        if len(path) > LONGEST_URL:
            return 414, "the address is too long"
        if sum(len(name) + len(value) for name, value in headers.items()) > LONGEST_HEADERS:
            return 431, "the headers are too long"
        host = headers.get("host", "")
        if _name(host) not in self.names:
            return 421, "another host name than this server's"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "from another site"
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "from another site"
        return None


def _name(host: str) -> str:
    """A host header without its port; an IPv6 address without its brackets."""
    name, _, port = host.rpartition(":")
    found = name if name and port.isdecimal() else host
    return found.lower().strip("[]")


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


@dataclass(frozen=True)
class Answer:
    """A page, before the web framework makes a response of it."""

    body: str | bytes
    status: int = 200
    kind: str = "text/html"
    policy: str | None = PAGE_POLICY


def plain(text: str, status: int) -> Answer:
    return Answer(f"{text}\n", status, "text/plain")


@dataclass(frozen=True)
class Pages:
    """What each address shows: from the words in the address (`path`) and behind its question mark (`query`)."""

    workspace: Workspace

    def start(self, path: Words, query: Words) -> Answer:
        asked = query.get("limit", "20")
        limit = min(int(asked), 1000) if asked.isdecimal() and int(asked) > 0 else 20
        found = history(limit=limit, workspace=self.workspace)
        rows, _ = latest(20, workspace=self.workspace)
        return Answer(start_page(found.series, found.left_out, rows))

    def series(self, path: Words, query: Words) -> Answer:
        found = history(HistoryFilters(key=path["key"]), workspace=self.workspace)
        if not found:
            return plain("no such series", 404)
        return Answer(page("serve_series", all_series=[(each, picture_of(each)) for each in found]))

    def record(self, path: Words, query: Words) -> Answer:
        known, row, is_cut_off = record_and_row(path["id"], workspace=self.workspace)
        text = as_text(detail(row, known, is_cut_off=is_cut_off))
        return Answer(page("serve_text", title=f"record {known.id}", text=text, asks=False, first="", other=""))

    def compared(self, path: Words, query: Words) -> Answer:
        first, other = (query.get(name, "") for name in ("a", "b"))
        text = ""
        if first and other:
            if not all(part.strip().isalnum() for side in (first, other) for part in side.split(",")):
                raise UsageError("give ids of records, or several joined by commas")
            text = str(compare(first, other, workspace=self.workspace))
        return Answer(page("serve_text", title="compare", text=text, asks=True, first=first, other=other))

    def report(self, path: Words, query: Words) -> Answer:
        with self.workspace.reading() as kept:
            records = kept.find(limit=REPORTED)[::-1]
        ceilings_of = self.workspace.ceilings_of(records)
        contents = contents_of(records, title="the latest records", ceilings_of=ceilings_of)
        policy = f"{dashboard_policy()}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        return Answer(dashboard(contents, report_of(contents)), policy=policy)

    def as_json(self, path: Words, query: Words) -> Answer:
        return Answer(history(workspace=self.workspace).to_json(), kind="application/json", policy=None)

    def static(self, path: Words, query: Words) -> Answer:
        found = static_file(path["name"])
        return plain("no such file", 404) if found is None else Answer(found[0], kind=found[1], policy=None)


Make: TypeAlias = Callable[[Pages, Words, Words], Answer]
Endpoint: TypeAlias = "Callable[[Request], Awaitable[Response]]"


class Answers:
    """Pages of the last second: viewers who ask for the same one cost as much as a single viewer.

    Few are made at a time, so that a crowd does not take the processor from what is being measured.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[float, asyncio.Future[Answer]]] = {}
        self._makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="page")

    async def get(self, name: str, make: Callable[[], Answer], *, is_watched: bool = False) -> Answer:
        now, fresh_s = time.monotonic(), WATCHED_FRESH_S if is_watched else FRESH_S
        self._made = {
            each: (at, answer) for each, (at, answer) in self._made.items() if now - at < fresh_s or not answer.done()
        }
        if name not in self._made:
            self._made[name] = now, asyncio.get_running_loop().run_in_executor(self._makers, make)
        return await asyncio.shield(self._made[name][1])

    def forget(self) -> None:
        """Another look has found something new: what was made before is out of date."""
        self._made.clear()


class Site:
    """The pages as responses, for those who are let in."""

    def __init__(self, workspace: Workspace, access: Access) -> None:
        self._workspace = workspace
        self._access = access
        self._looker = Looker()
        self._answers = Answers()
        self._live = Live(self._look, self._answers.forget)

    def _look(self) -> LiveState:
        with self._workspace.reader() as opened, opened.reading() as kept:
            return self._looker.look(kept)

    def showing(self, make: Make, *asked: str, is_open: bool = False) -> Endpoint:
        """What answers an address with a page; `asked`: the words behind the question mark that it reads."""

        async def answer(request: Request) -> Response:
            if (refused := self._refusal(request, is_open=is_open)) is not None:
                return refused
            path = dict(request.path_params)
            query = {name: request.query_params[name] for name in asked if name in request.query_params}
            name, is_watched = f"{make.__name__} {path} {query}", self._live.viewers > 0
            return _response(
                await self._answers.get(name, lambda: self._made(make, path, query), is_watched=is_watched)
            )

        return answer

    def _made(self, make: Make, path: Words, query: Words) -> Answer:
        try:
            with self._workspace.reader() as opened:
                return make(Pages(opened), path, query)
        except RedlineError as error:
            is_away = isinstance(error, StoreError) and error.__cause__ is not None
            return plain(" ".join(str(error).splitlines()), 503 if is_away else 404)

    def _refusal(self, request: Request, *, is_open: bool = False) -> Response | None:
        refusal = self._access.refusal(request.method, request.headers, str(request.url))
        if refusal is not None:
            return _response(plain(refusal[1], refusal[0]))
        if not is_open and not self._access.knows(request.cookies.get(COOKIE)):
            return _response(plain("open the address with the token that the server printed when it was started", 401))
        return None

    async def enter(self, request: Request) -> Response:
        """Trade the token in the address for a cookie."""
        from starlette.responses import RedirectResponse

        if (refused := self._refusal(request, is_open=True)) is not None:
            return refused
        if not self._access.knows(request.query_params.get("token")):
            return _response(plain("wrong token", 401))
        entered = RedirectResponse("/", 303, HEADERS)
        secure = request.url.scheme == "https"
        entered.set_cookie(COOKIE, self._access.token or "", httponly=True, samesite="strict", secure=secure, path="/")
        return entered

    async def events(self, request: Request) -> Response:
        """What is being measured, as server-sent events."""
        from starlette.responses import Response, StreamingResponse

        if (refused := self._refusal(request)) is not None:
            return refused
        if self._live.viewers >= MOST_VIEWERS:
            return _response(plain("too many viewers", 503))
        if request.method == "HEAD":  # a response without a body must not wait for events
            return Response(None, 200, HEADERS, "text/event-stream")
        return StreamingResponse(self._live.events(), 200, HEADERS, "text/event-stream")

    async def nowhere(self, request: Request) -> Response:
        return self._refusal(request) or _response(plain("no such page", 404))


def _response(answer: Answer) -> Response:
    from starlette.responses import Response

    headers = HEADERS if answer.policy is None else {**HEADERS, "Content-Security-Policy": answer.policy}
    return Response(answer.body, answer.status, headers, answer.kind)


def make_app(workspace: Workspace, access: Access) -> Any:
    """The ASGI application: which address shows what."""
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError:
        raise MissingExtra("redline serve", "starlette", "serve") from None
    site = Site(workspace, access)
    app = Starlette(
        routes=[
            Route("/", site.showing(Pages.start, "limit")),
            Route("/series/{key}", site.showing(Pages.series)),
            Route("/records/{id}", site.showing(Pages.record)),
            Route("/compare", site.showing(Pages.compared, "a", "b")),
            Route("/report", site.showing(Pages.report)),
            Route("/api/history", site.showing(Pages.as_json)),
            Route("/static/{name}", site.showing(Pages.static, is_open=True)),
            Route("/login", site.enter),
            Route("/events", site.events),
            Route("/{path:path}", site.nowhere),
        ]
    )
    app.router.redirect_slashes = False  # it would redirect to the host that the request names
    return app


@verb(examples=("redline serve", "redline serve --host 0.0.0.0 --name bench.example.org"))
def serve(
    *,
    host: Annotated[
        str, setting("The address to listen on. Any other than loopback requires the token.", group=WAY)
    ] = "127.0.0.1",
    port: Annotated[int, setting("The port; 0 takes a free one.", group=WAY)] = 8765,
    token: Annotated[bool, setting("Require a token on loopback too.", group=WAY)] = False,
    names: Annotated[
        Sequence[str],
        setting("Another host name it answers to. Repeatable.", option="--name", group=WAY, kind=list[str]),
    ] = (),
    workspace: Workspace | None = None,
) -> int:
    """Show the history as a web page, live and read-only.

    Ctrl-C ends it. The address is printed on stderr. With a token, the address contains it: open it once, and a cookie remembers it.
    """
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("redline serve", "uvicorn", "serve") from None
    if not 0 <= port <= 65535:
        raise UsageError(f"port must be between 0 and 65535, got {port}")
    needs_token = token or not is_loopback(host)
    access = Access(host, secrets.token_urlsafe(32) if needs_token else None, tuple(names))
    listening = _listening(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    # Requests are not logged: the address of a login holds the token.
    config = uvicorn.Config(
        make_app(workspace or Workspace(), access),
        access_log=False,
        log_level="warning",
        limit_concurrency=MOST_VIEWERS + 100,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        server_header=False,
        proxy_headers=False,
        http=_impatient_protocol(),
        ws="none",
    )
    give_way()  # not before: while it starts, somebody waits for it
    shown = f"{address}login?token={access.token}" if access.token else address
    print(f"redline: {shown}", file=sys.stderr, flush=True)  # noqa: T201  (the address is all that is printed)
    uvicorn.Server(config).run(sockets=[listening])
    return Exit.DONE


def _impatient_protocol() -> Any:
    """uvicorn's HTTP protocol with a time limit for the head of a request, for which uvicorn would wait forever."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):  # type: ignore[misc]
        expiry: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self.expect()
            else:
                self.rest()

        def connection_lost(self, error: Exception | None) -> None:
            self.rest()
            super().connection_lost(error)

        def expect(self) -> None:
            if self.expiry is None:
                self.expiry = self.loop.call_later(SLOWEST_REQUEST_S, self.transport.abort)

        def rest(self) -> None:
            if self.expiry is not None:
                self.expiry.cancel()
                self.expiry = None

    return Protocol


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections take it over
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
        listening.bind((host, port))
    except (OSError, UnicodeError) as error:  # not a name that could be looked up
        why = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"cannot listen on {host} port {port}: {why or error}") from None
    listening.listen(128)
    return listening
