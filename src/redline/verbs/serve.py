"""`redline serve`: the history as web pages, read-only, with live progress as server-sent events.

Pages are the results of other verbs. Viewers do not disturb a measurement: pages come from read-only transactions and are made once for all who ask
in the same second, one task looks at the history for all viewers together, and telemetry is what the measuring process has written down.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from redline.analyze.gate import middle_s
from redline.model.errors import Exit, MissingExtra, RecordError, RedlineError, StoreError, UsageError
from redline.model.fields import Frozen
from redline.model.metrics import Metric, Row, Table, in_words
from redline.model.record import TelemetrySample
from redline.model.settings import WAY, setting
from redline.model.spec import BASELINE
from redline.model.units import format_bytes, format_ratio, format_seconds, format_share, significant
from redline.search.tune.record import decode_tune
from redline.show.contents import contents_of
from redline.show.dashboard import dashboard, dashboard_policy
from redline.show.page import STATIC, page, static_file
from redline.show.report import result_of as report_of
from redline.store import Activity, History
from redline.store import Row as Listed
from redline.system.processes import give_way
from redline.verbs.compare import compare
from redline.verbs.history import history, show
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

COOKIE = "redline"
MOST_VIEWERS = 200
REPORTED = 500
"""How many of the latest records the served report has; `redline report` writes one of all."""
SHOWN_POINTS = 200
CHOICES = 200
"""Of the latest records two can be picked to compare; any other pair by its ids in the address."""
LONGEST_URL, LONGEST_HEADERS = 4096, 16384
FRESH_S = 1.0
"""How long a page, or a look at what is being measured, is served again before it is made anew."""
SLOWEST_REQUEST_S = 10.0
"""For the head of a request to arrive: who sends it byte by byte holds a connection no longer than this."""
STUCK_MS = 60_000
"""A viewer who takes nothing for so long is disconnected, where the system can tell."""
MAKERS = 2
"""Pages that are made at the same time, so that a crowd does not take the processor from what is being measured."""
CROWD = 50
"""As many viewers are told half as often: each of them costs a little, and the measurement comes first."""
SIGN_OF_LIFE_S = 15.0
RUNNING, RECENT_BLOCKS = 8, 16
"""Records that are being measured, and their latest blocks: more are not read, however long it takes."""
RECENT_S, FORGOTTEN_S = 600.0, 7 * 86400.0
"""How long a grid is shown after its last cell was settled, and one that was cut short as unfinished."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Words = Mapping[str, str]
T = TypeVar("T")


class Access:
    """Who may look: on another address than loopback, those who know the token."""

    def __init__(self, host: str, token: str | None = None, names: Sequence[str] = ()) -> None:
        self.token = token
        plain = (name.lower().strip("[]") for name in ("localhost", "127.0.0.1", "::1", host, *names))
        self.names = [f"[{name}]" if ":" in name else name for name in plain]

    def knows(self, given: str | None) -> bool:
        return self.token is None or (given is not None and hmac.compare_digest(given.encode(), self.token.encode()))

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """Status and reason, for a request that a web framework would answer and that is no viewer's."""
        headers, path = request.headers, request.url.path
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "a request has no body here"
        if len(str(request.url)) > LONGEST_URL:
            return 414, "the address is too long"
        if sum(len(name) + len(value) for name, value in headers.items()) > LONGEST_HEADERS:
            return 431, "the headers are too long"
        origin = headers.get("origin")
        is_foreign = origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
        is_fetched = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        if is_foreign or is_fetched:
            return 403, "from another site"
        is_open = path == "/login" or path.startswith("/static/")
        if not is_open and not self.knows(request.cookies.get(COOKIE)):
            return 401, "open the address with the token that the server printed when it was started"
        return None


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


@dataclass(frozen=True)
class Answer:
    """A page, before the web framework makes a response of it."""

    body: str
    status: int = 200
    kind: str = "text/html"
    policy: str | None = PAGE_POLICY


def plain(text: str, status: int) -> Answer:
    return Answer(f"{text}\n", status, "text/plain")


# What each address shows, from the words in the address and behind its question mark


def link(table: Table, row: Row) -> str:
    return f"/series/{row['key']}" if table.name == "series" else f"/records/{row.record_id}" if row.record_id else ""


def start(workspace: Workspace, words: Words) -> Answer:
    asked = words["limit"]
    limit = min(int(asked), 1000) if asked.isdecimal() and int(asked) > 0 else 20
    trends = history(limit=limit, with_points=False, workspace=workspace)
    few = tuple(table for table in trends.tables if not table.is_detail)
    latest = show(limit=20, workspace=workspace)
    (records,) = latest.tables
    rows = tuple(_only(row, records.columns) for row in records.rows)
    latest = replace(latest, tables=(msgspec.structs.replace(records, title="Latest records", rows=rows),))
    return Answer(page("history", replace(trends, tables=few, picture=None), latest, is_start=True, link=link))


def _only(row: Row, columns: Sequence[str]) -> Row:
    """A row without what its table does not show."""
    metrics = tuple(metric for metric in row.metrics if metric.name in columns)
    facts = {name: row.get(name) for name in columns if name in row and not row.metric(name)}
    return msgspec.structs.replace(row, facts=facts, metrics=metrics, notes=())


def series(workspace: Workspace, words: Words) -> Answer:
    found = history(key=words["key"], workspace=workspace)
    if not found.rows:
        return plain("no such series", 404)
    tables = [
        msgspec.structs.replace(table, rows=table.rows[: -SHOWN_POINTS - 1 : -1]) if table.is_detail else table
        for table in found.tables
    ]
    return Answer(page(str(found.rows[0]["benchmark"]), replace(found, tables=tuple(tables)), link=link))


def record(workspace: Workspace, words: Words) -> Answer:
    found = show(words["id"], workspace=workspace)
    return Answer(page(str(found.headline), replace(found, headline=None)))


def compared(workspace: Workspace, words: Words) -> Answer:
    sides = [words["a"], words["b"]]
    if not all(part.strip().isalnum() for side in sides if side for part in side.split(",")):
        raise UsageError("give ids of records, or several joined by commas")
    results = [compare(*sides, workspace=workspace)] if all(sides) else []
    latest = show(limit=CHOICES, workspace=workspace).tables[0]
    choices = [(row.record_id, _choice(row)) for row in latest.rows if row.record_id]
    known = {record_id for record_id, _ in choices}
    choices += [(side, side) for side in sides if side and side not in known]
    return Answer(page("compare two records", *results, sides=sides, choices=choices))


def _choice(row: Row) -> str:
    """What a list calls a record: what was measured, how fast it was, and when."""
    names = ("model", "task", "recipe", "batch", "throughput", "measured_at")
    values = ((name, row.get(name)) for name in names)
    return " · ".join(
        value.in_words if isinstance(value, Metric) else in_words(name, value) for name, value in values if value
    )


def report(workspace: Workspace, words: Words) -> Answer:
    with workspace.reading() as kept:
        records = kept.find(limit=REPORTED)[::-1]
    contents = contents_of(records, title="the latest records", ceilings_of=workspace.ceilings_of(records))
    policy = f"{dashboard_policy()}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Answer(dashboard(contents, report_of(contents)), policy=policy)


def as_json(workspace: Workspace, words: Words) -> Answer:
    return Answer(history(workspace=workspace).to_json(), kind="application/json", policy=None)


def static(workspace: Workspace, words: Words) -> Answer:
    kind = STATIC.get(words["name"])
    return plain("no such file", 404) if kind is None else Answer(static_file(words["name"]), kind=kind, policy=None)


def nowhere(workspace: Workspace, words: Words) -> Answer:
    return plain("no such page", 404)


Make = Callable[[Workspace, Words], Answer]
ADDRESSES: dict[str, Make] = {
    "/": start,
    "/series/{key}": series,
    "/records/{id}": record,
    "/compare": compared,
    "/report": report,
    "/api/history": as_json,
    "/static/{name}": static,
    "/{path:path}": nowhere,
}
READ = ("limit", "a", "b")
"""Words behind the question mark that a page reads; others make no other page."""


class Shared:
    """What was made in the last second: viewers who ask for the same cost as much as a single one."""

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


class LiveState(Frozen):
    """What viewers are sent each time it changes."""

    lines: tuple[str, ...] = ()
    """What is being measured, a line each."""
    stored: int = 0
    """Records in the history."""
    latest: str | None = None
    problem: str | None = None
    """Why the history cannot be read at the moment."""


# What is being measured now, as the measuring processes write it down


def look(kept: History) -> LiveState:
    latest = kept.rows(limit=1)
    activities = kept.activities()
    running = [row for row in kept.rows(status="running", limit=RUNNING) if row.status == "running"]
    lines = [
        *_searches(kept, {each.name: each for each in activities if each.kind == "tune"}),
        *_grids(kept, [each for each in activities if each.kind == "sweep"]),
        *(
            _line(f"watch {each.name}", each.now, *_readings(each.telemetry))
            for each in activities
            if each.kind == "watch" and not each.is_over
        ),
        *(line for row in running if (line := _record_line(row, kept))),
    ]
    return LiveState(lines=tuple(lines), stored=kept.count(), latest=latest[0].id if latest else None)


def _line(*words: str) -> str:
    return " · ".join(filter(None, words))


def _left(seconds: float | None) -> str:
    return (
        ""
        if seconds is None
        else f"about {format_seconds(round(seconds))} left"
        if seconds < 90
        else f"about {seconds / 60:.0f} min left"
    )


CUT_SHORT = "cut short; the same command goes on"


def _searches(kept: History, activities: Mapping[str, Activity]) -> Iterator[str]:
    ledger = kept.tunes()
    for row in ledger.rows():
        activity = activities.get(row.name)
        goes_on = activity is not None and not activity.is_over
        if row.state != "running" or (not goes_on and time.time() - row.created_at > FORGOTTEN_S):
            continue
        with suppress(RecordError):  # of a newer Redline, or damaged: there is nothing to say about it
            search = decode_tune(ledger.load(row.name) or b"")
            left_s = max(search.budget_s - max(time.time() - search.created_at, 0.0), 0.0)
            ahead = f"{left_s:.0f} s left at most" if goes_on else CUT_SHORT
            leader = _leader({trial.record_id: trial.recipe for trial in search.trials}, kept)
            yield _line(f"tune {search.name}", f"{len(search.trials)} trials", leader, ahead)


def _leader(recipes: Mapping[str, str], kept: History) -> str:
    """The fastest recipe so far that computes the same, and its speed over the baseline's."""
    steps = {
        record_id: step_s
        for record_id, record in kept.load_many(recipes).items()
        if record.prepared and not record.prepared.numerics.is_wrong and (step_s := middle_s([record])) is not None
    }
    if not steps:
        return "no leader yet"
    best = min(steps, key=lambda record_id: steps[record_id])
    first = next((steps[each] for each, recipe in recipes.items() if recipe == BASELINE and each in steps), None)
    return f"leader {recipes[best]}" + (f" {format_ratio(first / steps[best])}" if first else "")


def _grids(kept: History, activities: Sequence[Activity]) -> Iterator[str]:
    """Yields those that go on, those that were cut short, and those that have settled a cell not long ago."""
    said = {each.name: each for each in activities if not (each.is_over and time.time() - each.begun_at > FORGOTTEN_S)}
    settled = {name: (number, failed) for name, number, failed in kept.recent_sweeps(time.time() - RECENT_S)}
    for name in sorted(said.keys() | settled.keys()):
        activity, fastest = said.get(name), kept.fastest_cell(name)
        number, failed = settled.get(name, (activity.done if activity else 0, 0))
        goes_on = activity is not None and not activity.is_over
        left_s = None
        if activity is not None and goes_on and activity.total and (here := activity.done - activity.done_before) > 0:
            # It goes on at the pace of what this process has done so far.
            left_s = (time.time() - activity.begun_at) / here * (activity.total - activity.done)
        yield _line(
            f"grid {name}",
            "running" if goes_on else "done" if activity is None else CUT_SHORT,
            f"{number} of {activity.total} cells settled" if activity else f"{number} cells settled",
            f"{failed} failed" if failed else "",
            f"now {activity.now}" if activity and goes_on and activity.now else "",
            _left(left_s),
            f"fastest {fastest[0]}, {significant(fastest[1], 4)} per second" if fastest else "",
            *_readings(activity.telemetry if activity and goes_on else None),
        )


def _readings(sample: TelemetrySample | None) -> Iterator[str]:
    if sample is not None:
        yield f"{sample.power_w:.0f} W" if sample.power_w else ""
        yield f"{sample.temperature_c:.0f} °C" if sample.temperature_c else ""
        yield f"{format_share(sample.utilisation)} busy" if sample.utilisation is not None else ""
        yield f"{format_bytes(sample.memory_used_bytes)} used" if sample.memory_used_bytes else ""


def _record_line(row: Listed, kept: History) -> str:
    """Empty for a record that cannot be read, or was deleted just now."""
    try:
        record, blocks = kept.load_recent(row.id, RECENT_BLOCKS)
    except (RecordError, StoreError):
        return ""
    last = record.blocks[-1].telemetry[-1] if record.blocks and record.blocks[-1].telemetry else None
    far, left_s = f"{blocks} blocks", None
    if record.spec.train is not None:
        done, total = record.epochs[-1].number if record.epochs else 0, record.spec.train.epochs
        far = f"epoch {done} of {total}"
        left_s = (time.time() - row.created_at) / done * (total - done) if done else None
    step_s = middle_s([record])
    return _line(
        f"{row.model} {row.task} {row.recipe}",
        f"batch {row.batch}" if row.batch else "",
        row.device_name or row.device,
        far,
        f"{format_seconds(step_s)} a step" if step_s else "preparing",
        _left(left_s),
        *_readings(last),
    )


class Site:
    """The pages as responses."""

    def __init__(self, workspace: Workspace, access: Access) -> None:
        self._workspace = workspace
        self._access = access
        self._shared = Shared()
        self.viewers = 0

    def showing(self, make: Make) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            words = request.path_params | {name: request.query_params.get(name, "") for name in READ}
            return _response(await self._shared.get(f"{make.__name__} {words}", lambda: self._made(make, words)))

        return answer

    def _made(self, make: Make, words: Words) -> Answer:
        try:
            with self._workspace.reader() as opened:
                return make(opened, words)
        except RedlineError as error:
            is_away = isinstance(error, StoreError) and error.__cause__ is not None
            return plain(" ".join(str(error).splitlines()), 503 if is_away else 404)

    async def enter(self, request: Request) -> Response:
        """Trades the token in the address for a cookie."""
        from starlette.responses import RedirectResponse

        if not self._access.knows(request.query_params.get("token")):
            return _response(plain("wrong token", 401))
        entered = RedirectResponse("/", 303, HEADERS)
        secure = request.url.scheme == "https"
        entered.set_cookie(COOKIE, self._access.token or "", httponly=True, samesite="strict", secure=secure, path="/")
        return entered

    async def live(self, request: Request) -> Response:
        """What is being measured, as server-sent events."""
        from starlette.responses import Response, StreamingResponse

        if self.viewers >= MOST_VIEWERS:
            return _response(plain("too many viewers", 503))
        if request.method == "HEAD":  # a response without a body must not wait for events
            return Response(None, 200, HEADERS, "text/event-stream")
        return StreamingResponse(self.events(), 200, HEADERS, "text/event-stream")

    async def events(self) -> AsyncIterator[bytes]:
        """One look a second serves all viewers; a slow one is sent the latest and nothing that it has missed."""
        sent, sent_at = b"", 0.0
        self.viewers += 1
        try:
            while True:
                event = await self._shared.get("live", self._look)
                if event != sent or time.monotonic() - sent_at > SIGN_OF_LIFE_S:
                    yield event if event != sent else b": still here\n\n"
                    sent, sent_at = event, time.monotonic()
                await asyncio.sleep(FRESH_S * (1 + self.viewers / CROWD))
        finally:
            self.viewers -= 1

    def _look(self) -> bytes:
        try:
            with self._workspace.reader() as opened, opened.reading() as kept:
                state = look(kept)
        except RedlineError as error:  # the history is away for a moment: the next look may find it
            state = LiveState(problem=" ".join(str(error).split()))
        return b"data: " + msgspec.json.encode(state) + b"\n\n"


def _response(answer: Answer) -> Response:
    from starlette.responses import Response

    headers = HEADERS if answer.policy is None else {**HEADERS, "Content-Security-Policy": answer.policy}
    return Response(answer.body, answer.status, headers, answer.kind)


def make_app(workspace: Workspace, access: Access) -> Any:
    """The ASGI application: which address shows what, to requests for a host of these names and from no other site."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.routing import Route
    except ImportError:
        raise MissingExtra("redline serve", "starlette", "serve") from None

    class Guard:
        """Refuses what is no viewer's request."""

        def __init__(self, app: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            refused = access.refusal(Request(scope)) if scope["type"] == "http" else None
            await (_response(plain(refused[1], refused[0])) if refused else self._app)(scope, receive, send)

    site = Site(workspace, access)
    others = [Route("/login", site.enter), Route("/events", site.live)]
    app = Starlette(
        routes=[*others, *(Route(address, site.showing(make)) for address, make in ADDRESSES.items())],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=access.names, www_redirect=False),
            Middleware(Guard),
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
    access = Access(host, secrets.token_urlsafe(32) if token or not is_loopback(host) else None, names)
    listening = _listening(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
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
            self.expect(is_waiting=True)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.expect(is_waiting=self.conn.their_state is h11.IDLE)

        def connection_lost(self, error: Exception | None) -> None:
            self.expect(is_waiting=False)
            super().connection_lost(error)

        def expect(self, *, is_waiting: bool) -> None:
            if is_waiting and self.expiry is None:
                self.expiry = self.loop.call_later(SLOWEST_REQUEST_S, self.transport.abort)
            elif not is_waiting and self.expiry is not None:
                self.expiry.cancel()
                self.expiry = None

    return Protocol


def _listening(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:  # not a name that could be looked up
        why = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"cannot listen on {host} port {port}: {why or error}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections take it over
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
    return listening
