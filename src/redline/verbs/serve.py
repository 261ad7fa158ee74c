"""`redline serve`: the history as web pages, read-only, with live progress as server-sent events.

Pages are the results of other verbs. Viewers do not disturb a measurement: pages come from read-only transactions and are made once for all who ask
in the same second, and one look at the history serves all viewers together.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from redline.model.errors import Exit, MissingExtra, RedlineError, StoreError, UsageError
from redline.model.fields import Frozen
from redline.model.metrics import Row, Table
from redline.model.record import RunRecord
from redline.model.settings import WAY, setting
from redline.show.contents import contents_of
from redline.show.dashboard import dashboard, dashboard_policy
from redline.show.page import page
from redline.show.report import result_of as report_of
from redline.store import Activity, History
from redline.system.processes import give_way
from redline.verbs.compare import compare
from redline.verbs.history import history, show
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response

COOKIE = "redline"
MOST_VIEWERS = 300
"""Connections at the same time; more are answered with 503, so that a crowd costs no more memory than this."""
REPORTED = 500
"""The served report has so many of the latest records; `redline report` writes one of all."""
SHOWN_POINTS = 200
"""A page of a series lists so many of its latest records."""
LONGEST_HEADERS = 16384
"""The head of a request has at most so many bytes."""
FRESH_S = 1.0
"""A page, or a look at what is being measured, is served again for so long before it is made anew."""
SLOWEST_REQUEST_S = 10.0
"""The head of a request has so long to arrive: who sends it byte by byte holds a connection no longer than this."""
MAKERS = 2
"""Pages that are made at the same time, so that a crowd does not take the processor from what is being measured."""
SIGN_OF_LIFE_S = 15.0
"""A viewer is sent something this often, so that one who is gone is noticed."""
RUNNING = 8
"""A line tells of so many records that are being measured: more are not read, however long they take."""
FORGOTTEN_S = 7 * 86400.0
"""A grid or a search that was cut short is shown as unfinished for so long."""
_FRAMES = "base-uri 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"form-action 'self'; {_FRAMES}"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    # A connection serves one request, so that only the first head has to be waited for.
    "Connection": "close",
}
Words = Mapping[str, str]
T = TypeVar("T")


# These functions say what each address shows, from the words in the address and behind its question mark.


def link(table: Table, row: Row) -> str:
    return f"/series/{row['key']}" if table.name == "series" else f"/records/{row.record_id}" if row.record_id else ""


def start(workspace: Workspace, words: Words) -> str:
    trends = history(words["model"] or None, workspace=workspace)
    trends = replace(trends, tables=tuple(table for table in trends.tables if not table.is_detail), picture=None)
    latest = show(workspace=workspace)
    records = msgspec.structs.replace(latest.tables[0], title="Latest records")
    return page("history", trends, replace(latest, tables=(records,)), is_start=True, link=link)


def series(workspace: Workspace, words: Words) -> str:
    found = history(key=words["key"], workspace=workspace)
    if not found.rows:
        raise UsageError("no such series")
    *tables, points = found.tables
    points = msgspec.structs.replace(points, rows=points.rows[: -SHOWN_POINTS - 1 : -1])
    return page(str(found.rows[0]["benchmark"]), replace(found, tables=(*tables, points)), link=link)


def record(workspace: Workspace, words: Words) -> str:
    found = show(words["id"], workspace=workspace)
    return page(str(found.headline), replace(found, headline=None))


def compared(workspace: Workspace, words: Words) -> str:
    sides = [words["a"], words["b"]]
    if not all(part.strip().isalnum() for side in sides if side for part in side.split(",")):
        raise UsageError("give ids of records, or several joined by commas")
    results = [compare(*sides, workspace=workspace)] if all(sides) else []
    return page("compare two records", *results, sides=sides)


def report(workspace: Workspace, words: Words) -> str:
    with workspace.reading() as kept:
        records = kept.find(limit=REPORTED)[::-1]
    contents = contents_of(records, title="the latest records", ceilings_of=workspace.ceilings_of(records))
    return dashboard(contents, report_of(contents))


Make = Callable[[Workspace, Words], str]
ADDRESSES: dict[str, Make] = {
    "/": start,
    "/series/{key}": series,
    "/records/{id}": record,
    "/compare": compared,
    "/report": report,
}
READ = ("model", "a", "b")
"""Words behind the question mark that a page reads; others make no other page."""


# The measuring processes write down what is being measured now, and the following reads it.


class LiveState(Frozen):
    """Viewers are sent this each time it changes."""

    lines: tuple[str, ...] = ()
    """These say what is being measured, a line each."""
    stored: int = 0
    """The history has so many records."""
    latest: str | None = None
    problem: str | None = None
    """This says why the history cannot be read at the moment."""


def look(kept: History) -> LiveState:
    running = [row.id for row in kept.rows(status="running", limit=RUNNING) if row.status == "running"]
    records = kept.load_many(running, with_blocks=False).values()
    lines = (*map(_activity_line, kept.activities()), *map(_record_line, records))
    latest = kept.rows(limit=1)
    return LiveState(lines=tuple(filter(None, lines)), stored=kept.count(), latest=latest[0].id if latest else None)


def _line(*words: str) -> str:
    return " · ".join(filter(None, words))


def _activity_line(activity: Activity) -> str:
    """Returns how far a grid, a search or a watched script is. One that was cut short goes on with the same command, but a script does
    not."""
    name, elapsed_s = f"{activity.kind} {activity.name}", time.time() - activity.begun_at
    if activity.is_over:
        is_shown = activity.kind != "watch" and elapsed_s < FORGOTTEN_S
        return _line(name, "cut short; the same command goes on", activity.now) if is_shown else ""
    far = f"{activity.done} of {activity.total} settled" if activity.total else ""
    # It goes on at the pace of what this process has done so far.
    here = activity.done - activity.done_before
    left = _left(elapsed_s / here * (activity.total - activity.done)) if activity.total and here > 0 else ""
    return _line(name, far, activity.now, left)


def _left(seconds: float) -> str:
    return f"about {f'{seconds:.0f} s' if seconds < 90 else f'{seconds / 60:.0f} min'} left"


def _record_line(running: RunRecord) -> str:
    spec, since = running.spec, time.strftime("%H:%M", time.localtime(running.created_at))
    epoch = f"epoch {running.epochs[-1].number}" if running.epochs else ""
    what = f"{spec.workload.model} {spec.workload.task} {spec.recipe}"
    return _line(what, f"on {spec.device}", f"since {since}", epoch)


# The server


class Shared:
    """This holds what was made in the last second, so that viewers who ask for the same cost as much as a single one."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[float, asyncio.Future[Any]]] = {}
        self._makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="page")

    async def get(self, name: str, make: Callable[[], T]) -> T:
        now = time.monotonic()
        self._made = {
            key: (at, made) for key, (at, made) in self._made.items() if now - at < FRESH_S or not made.done()
        }
        if name not in self._made:
            self._made[name] = now, asyncio.get_running_loop().run_in_executor(self._makers, make)
        found: T = await asyncio.shield(self._made[name][1])
        return found


async def live(workspace: Workspace, shared: Shared) -> AsyncIterator[bytes]:
    """Tells a viewer what is being measured. A slow one is sent the latest and nothing that it has missed."""

    def made() -> bytes:
        try:
            with workspace.reader() as opened, opened.reading() as kept:
                state = look(kept)
        except RedlineError as error:  # the history is away for a moment: the next look may find it
            state = LiveState(problem=" ".join(str(error).split()))
        return b"data: " + msgspec.json.encode(state) + b"\n\n"

    sent, sent_at = b"", 0.0
    while True:
        event = await shared.get("live", made)
        if event != sent or time.monotonic() - sent_at > SIGN_OF_LIFE_S:
            yield event if event != sent else b": still here\n\n"
            sent, sent_at = event, time.monotonic()
        await asyncio.sleep(FRESH_S)


def make_app(workspace: Workspace, names: Sequence[str] = (), token: str | None = None) -> Any:
    """Returns the ASGI application: which address shows what, to requests for this machine by one of its names, from no other site, and
    with the token if there is one."""
    try:
        from starlette.applications import Starlette
        from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
        from starlette.middleware import Middleware
        from starlette.middleware.authentication import AuthenticationMiddleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles
    except ImportError:
        raise MissingExtra("redline serve", "starlette", "serve") from None

    def knows_token(given: str | None) -> bool:
        return token is None or hmac.compare_digest((given or "").encode(), token.encode())

    class Viewers(AuthenticationBackend):  # type: ignore[misc]
        """Knows the viewers: a viewer comes from this site, or by a link from another, and brings the cookie. Styles and the login are open
        to all."""

        async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
            headers, path = conn.headers, conn.url.path
            is_fetched = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
            if is_fetched or urlsplit(headers.get("origin", f"//{conn.url.netloc}")).netloc != conn.url.netloc:
                raise AuthenticationError(403, "from another site")
            if not path.startswith(("/login", "/static/")) and not knows_token(conn.cookies.get(COOKIE)):
                raise AuthenticationError(
                    401, "open the address with the token that the server printed when it was started"
                )
            return AuthCredentials(), SimpleUser("viewer")

    def plain(status: int, text: str) -> Response:
        return PlainTextResponse(f"{text}\n", status, HEADERS)

    shared = Shared()

    def showing(make: Make) -> Callable[[Request], Any]:
        def made(words: Words) -> Response:
            try:
                with workspace.reader() as opened:
                    body = make(opened, words)
            except RedlineError as error:
                is_away = isinstance(error, StoreError) and error.__cause__ is not None
                return plain(503 if is_away else 404, " ".join(str(error).splitlines()))
            policy = f"{dashboard_policy()}; form-action 'none'; {_FRAMES}" if make is report else PAGE_POLICY
            return Response(body, 200, {**HEADERS, "Content-Security-Policy": policy}, "text/html")

        async def answer(request: Request) -> Response:
            words = request.path_params | {name: request.query_params.get(name, "") for name in READ}
            return await shared.get(f"{make.__name__} {words}", lambda: made(words))

        return answer

    async def enter(request: Request) -> Response:
        """Trades the token in the address for a cookie."""
        if not knows_token(request.query_params.get("token")):
            return plain(401, "wrong token")
        entered = RedirectResponse("/", 303, HEADERS)
        entered.set_cookie(COOKIE, token or "", httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return entered

    async def events(request: Request) -> Response:
        # A response without a body must not wait for events.
        stream = live(workspace, shared) if request.method == "GET" else iter(())
        return StreamingResponse(stream, 200, HEADERS, "text/event-stream")

    hosts = [name.lower().strip("[]") for name in ("localhost", "127.0.0.1", "::1", *names)]
    app = Starlette(
        routes=[
            Route("/login", enter),
            Route("/events", events),
            *(Route(address, showing(make)) for address, make in ADDRESSES.items()),
            Mount("/static", StaticFiles(packages=[("redline.show", "static")])),
        ],
        middleware=[
            Middleware(
                TrustedHostMiddleware,
                allowed_hosts=[f"[{host}]" if ":" in host else host for host in hosts],
                www_redirect=False,
            ),
            Middleware(AuthenticationMiddleware, backend=Viewers(), on_error=lambda _, error: plain(*error.args)),
        ],
    )
    app.router.redirect_slashes = False  # it would redirect to the host that the request names
    return app


@verb(examples=("redline serve", "redline serve --host 0.0.0.0 --name bench.example.org"))
def serve(
    *,
    host: Annotated[
        str, setting("The address to listen on. Any other than loopback requires the token.", group=WAY)
    ] = "127.0.0.1",
    port: Annotated[int, setting("The port; 0 takes a free one.", group=WAY, least=0, most=65535)] = 8765,
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

    secret = secrets.token_urlsafe(32) if token or not is_loopback(host) else None
    is_v6 = ":" in host
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET)
    except (OSError, UnicodeError) as error:  # the latter: not a name that could be looked up
        raise UsageError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}") from None
    # Requests are not logged: the address of a login holds the token.
    config = uvicorn.Config(
        make_app(workspace or Workspace(), (host, *names), secret),
        access_log=False,
        log_level="warning",
        limit_concurrency=MOST_VIEWERS,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        server_header=False,
        proxy_headers=False,
        http=impatient_protocol(),
        ws="none",
    )
    give_way()  # not before: while it starts, somebody waits for it
    address = f"http://{f'[{host}]' if is_v6 else host}:{listening.getsockname()[1]}/"
    print(f"redline: {address}{f'login?token={secret}' if secret else ''}", file=sys.stderr, flush=True)  # noqa: T201  (the address is all that is printed)
    uvicorn.Server(config).run(sockets=[listening])
    return Exit.DONE


def impatient_protocol() -> Any:
    """uvicorn's HTTP protocol, which drops a connection whose request does not arrive: uvicorn itself would wait forever."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(SLOWEST_REQUEST_S, lambda: self.cycle or transport.abort())

    return Impatient


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
