"""The history as web pages: what is shown, and what is refused. No port is opened; one test asks a real server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from reported import race_records
from sqlalchemy import text
from starlette.testclient import TestClient
from uvicorn.server import ServerState

import redline
from redline.model.protocol import SwitchChoice
from redline.model.record import RunRecord
from redline.search.observer import Observer
from redline.store import History, ledgers
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs import serve
from redline.verbs.serve import COOKIE, LiveState, is_loopback, look, make_app
from redline.verbs.workspace import Workspace

NASTY = "<script>alert(1)</script>"
FP16 = SwitchChoice(switch="fp16", family="precision")


@pytest.fixture
def kept() -> list[RunRecord]:
    base = race_records()
    spec = msgspec.structs.replace(base[0].spec, workload=msgspec.structs.replace(base[0].spec.workload, model=NASTY))
    nasty = msgspec.structs.replace(base[0], id="f" * 21, spec=spec, group=None)
    records = [*base, nasty]
    with History.open() as history:
        for record in records:
            history.finish(record)
    return records


def client(token: str | None = None, **settings: Any) -> TestClient:
    return TestClient(make_app(Workspace(), token=token), base_url="http://127.0.0.1:8765", **settings)


def test_every_page_answers(kept: list[RunRecord]) -> None:
    browser = client()
    start = browser.get("/")
    assert start.status_code == 200
    key = re.search(r"href='/series/([0-9a-f]+)'", start.text)
    assert key is not None
    pages = [
        f"/series/{key[1]}", f"/records/{kept[0].id}", f"/compare?a={kept[0].id}&b={kept[1].id}", "/report", "/compare",
        "/static/serve.js", "/static/serve.css",
    ]  # fmt: skip
    assert [browser.get(path).status_code for path in pages] == [200] * len(pages)
    assert browser.get("/?model=resnet50").status_code == 200
    assert "verdict" in browser.get(pages[2]).text


def test_names_are_text_and_nothing_from_elsewhere_is_loaded(kept: list[RunRecord]) -> None:
    for path in ("/", f"/records/{'f' * 21}"):
        answer = client().get(path)
        assert NASTY not in answer.text
        assert "&lt;script&gt;" in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_token_is_asked_for_and_kept_in_a_cookie(kept: list[RunRecord]) -> None:
    browser = client(token="secret", follow_redirects=False)
    for path in ("/", "/events", "/report"):
        assert browser.get(path).status_code == 401
    assert browser.get("/login?token=wrong").status_code == 401
    assert browser.get("/", headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
    entered = browser.get("/login?token=secret")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    flags = entered.headers["set-cookie"].lower()
    assert "httponly" in flags
    assert "samesite=strict" in flags
    assert browser.get("/").status_code == 200


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /", {"host": "evil.example.org"}, 400),
        ("GET /", {"host": ""}, 400),
        ("GET /", {"host": "localhost:80@evil.example.org"}, 400),
        ("GET /compare", {"origin": "http://evil.example.org"}, 403),
        ("GET /nowhere", {"origin": "null"}, 403),
        ("GET /", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
        ("GET /", {"origin": "http://127.0.0.1:8765"}, 200),
        ("GET /", {"host": "localhost:1"}, 200),
        ("GET /", {"host": "[::1]:8765"}, 200),
        ("GET /", {"host": "[::1]"}, 200),
        ("HEAD /events", {}, 200),  # what has no body ends
        *((f"{method} /", {}, 405) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")),
        ("GET /static/..%2f..%2fpyproject.toml", {}, 404),
        ("GET /static/../../etc/passwd", {}, 404),
        ("GET /records/..%2f..%2fetc%2fpasswd", {}, 404),
        ("GET /series/nothing", {}, 404),
        ("GET /compare?a=/etc/passwd&b=/etc/passwd", {}, 404),
        ("GET /nowhere", {}, 404),
        ("GET /?model=nothing", {}, 404),
        ("GET /records/%00", {}, 404),
        ("GET /report/", {"host": "localhost"}, 404),  # a slash too many leads nowhere else
    ],
)
def test_only_viewers_are_answered_and_only_with_pages(
    kept: list[RunRecord], request_line: str, headers: dict[str, str], status: int
) -> None:
    method, path = request_line.split(" ")
    answer = client(follow_redirects=False).request(method, path, headers=headers)
    assert (answer.status_code, "location" in answer.headers, "root:" in answer.text) == (status, False, False)


def test_a_server_on_an_ipv6_address_answers_to_it(kept: list[RunRecord]) -> None:
    app = make_app(Workspace(), ("2001:db8::7", "Bench.example.org"))
    for host, status in {"[2001:db8::7]:8765": 200, "bench.example.org:1": 200, "[2001:db8::8]:8765": 400}.items():
        assert TestClient(app).get("/compare", headers={"host": host}).status_code == status


def test_a_request_whose_head_does_not_arrive_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is whole is answered, and its connection closed, so that nobody can be slow with a second."""

    async def ask(request: bytes, limit_s: float) -> bytes:
        monkeypatch.setattr(serve, "SLOWEST_REQUEST_S", limit_s)
        config = uvicorn.Config(make_app(Workspace()), log_level="error")
        config.load()
        kind, state = serve.impatient_protocol(), ServerState()
        listening = await asyncio.get_running_loop().create_server(
            lambda: kind(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(request)
        said = b""
        with suppress(ConnectionResetError):
            said = await asyncio.wait_for(reader.read(), 30)  # until it is closed
        writer.close()
        listening.close()
        return said

    assert asyncio.run(ask(b"GET / HTTP/1.1\r\nX-Slow: ", 0.05)) == b""
    assert asyncio.run(ask(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 600.0)).startswith(b"HTTP/1.1 200")


def look_anew() -> tuple[str, ...]:
    """What a server that was just started shows."""
    with History.open(only_to_read=True) as history:
        return look(history).lines


def test_a_running_record_is_told(kept: list[RunRecord]) -> None:
    running = msgspec.structs.replace(kept[0], id="e" * 21, stopped=None, closed=None, group=None)
    with History.open() as history:
        history.begin(running)
        (line,) = look_anew()
    assert line.startswith("resnet50 infer baseline · on cuda:0 · since ")


class Restarting(Observer):
    """Looks at a grid through a new server before each cell, and interrupts it at the fifth."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def opened(self, record: RunRecord) -> None:
        self.seen += [line for line in look_anew() if line.startswith("sweep")]
        if len(self.seen) == 5:
            raise KeyboardInterrupt


def test_a_server_that_is_started_in_the_middle_of_a_grid_shows_all_of_it() -> None:
    observer = Restarting()
    truth = Landscape(step_s={"a": 0.01, "b": 0.002})
    grid: dict[str, Any] = {"model": ["a", "b"], "batch": [1, 2, 4], "name": "study", "launch": {"door": "fake"}}
    with Workspace(door=FakeDoor(truth), observer=observer) as workspace, pytest.raises(KeyboardInterrupt):
        redline.run(**grid, workspace=workspace)
    for number, line in enumerate(observer.seen):
        assert line.startswith(f"sweep study · {number} of 6 settled · ")
        assert ("left" in line) == (number > 0)
    with Workspace(door=FakeDoor(truth)) as workspace:
        redline.run(**grid, resume=True, workspace=workspace)
    assert look_anew() == ()


def test_a_grid_whose_process_is_gone_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with History.open() as history, history.hold("sweep", "study").held() as hold:
        hold.tell(3, 8, "resnet18", done_before=1)
        monkeypatch.setattr(ledgers, "is_gone", lambda process: True)
        (line,) = look_anew()
    assert line == "sweep study · cut short; the same command goes on · resnet18"


def test_a_watched_script_is_told() -> None:
    with History.open() as history, history.hold("watch", NASTY).held() as hold:
        hold.tell(120, None, "step 120 · 3.1 steps/s")
        assert look_anew() == (f"watch {NASTY} · step 120 · 3.1 steps/s",)
    assert look_anew() == ()


def test_viewers_share_one_look_and_hear_of_what_changed(own_history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "FRESH_S", 0.2)
    looks = 0

    def look(kept: History) -> LiveState:
        nonlocal looks
        looks += 1
        return LiveState(stored=looks // 3)

    async def watch() -> list[bytes]:
        shared = serve.Shared()
        streams = [serve.live(Workspace(), shared) for _ in range(20)]
        first = await asyncio.gather(*(anext(stream) for stream in streams))
        assert looks == 1
        return [*first, await anext(streams[0])]

    monkeypatch.setattr(serve, "look", look)
    got = asyncio.run(watch())
    stored = [json.loads(event.removeprefix(b"data: "))["stored"] for event in got]
    assert stored == [0] * 20 + [1], "what stays as it was is not sent again"


def test_a_crowd_that_asks_for_one_page_costs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    async def ask() -> None:
        shared = serve.Shared()
        await asyncio.gather(*(shared.get("/", lambda: made.append("page")) for _ in range(50)))
        assert len(made) == 1
        monkeypatch.setattr(serve, "FRESH_S", 0.0)
        await shared.get("/", lambda: made.append("page"))
        await shared.get("/other", lambda: made.append("other"))

    asyncio.run(ask())
    assert made == ["page", "page", "other"]


def test_a_history_that_is_replaced_or_deleted_is_shown_as_it_is(
    kept: list[RunRecord], own_history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "FRESH_S", 0.0)
    browser = client()
    other = tmp_path / "other.sqlite"
    with History.open(other) as history:
        history.finish(kept[-1])
    assert kept[0].id[:13] in browser.get("/").text
    other.replace(own_history)
    start = browser.get("/").text
    assert (kept[0].id[:13] in start, kept[-1].id[:13] in start) == (False, True)
    own_history.unlink()
    assert "nothing measured yet" in browser.get("/").text
    own_history.write_text("no database" * 100)
    broken = browser.get("/")
    assert (broken.status_code, "file is not a database" in broken.text) == (503, True)
    own_history.unlink()
    with History.open() as history:
        history.finish(kept[0])
    assert kept[0].id[:13] in browser.get("/").text


def test_a_search_whose_process_is_gone_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Observer):
        """Looks at the search before its process is gone, and after."""

        def __init__(self) -> None:
            self.seen: list[str] = []

        def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
            if not self.seen:
                self.seen = [line for line in look_anew() if line.startswith("tune")]
                with monkeypatch.context() as patched:
                    patched.setattr(ledgers, "is_gone", lambda process: True)
                    self.seen += [line for line in look_anew() if line.startswith("tune")]

    observer, door = Killed(), FakeDoor(Landscape(step_s={"*": 0.01}, choices=(FP16,), offset_sigma=0.001))
    with Workspace(door=door, observer=observer) as workspace:
        settings: dict[str, Any] = {"budget": "5m", "launch": {"door": "fake"}, "clock": lambda: door.clock_s}
        redline.tune("resnet50", batch=32, **settings, workspace=workspace)
    assert ["trials, at most 300 s in all" in observer.seen[0], "cut short" in observer.seen[1]] == [True, True]
    assert look_anew() == ()


def test_a_running_record_that_cannot_be_read_hides_nothing_else(kept: list[RunRecord]) -> None:
    running = msgspec.structs.replace(kept[0], id="e" * 21, stopped=None, closed=None, group=None)
    with History.open() as history:
        history.begin(running)
        damage = text("UPDATE records SET head = :head WHERE id = :id").bindparams(head=b"x", id=running.id)
        history._database.write(lambda connection: connection.execute(damage))
        with history.hold("watch", "train.py").held() as hold:
            hold.tell(3, None, "step 3")
            assert look_anew() == ("watch train.py · step 3",)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.5", False),
        ("x.org", False),
    ],
)
def test_loopback_is_told_from_other_addresses(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


def test_a_server_streams_events_beside_a_slow_and_an_oversized_request(kept: list[RunRecord], tmp_path: Path) -> None:
    """A real server on a free port; it is ended by the test."""
    command = [sys.executable, "-m", "redline", "serve", "--port", "0", "--token"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stderr.readline().strip()
            found = re.fullmatch(r"redline: http://127\.0\.0\.1:(\d+)/login\?token=(\S+)", address)
            assert found is not None, address
            port, token = int(found[1]), found[2]
            slow = socket.create_connection(("127.0.0.1", port), timeout=30)
            slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            big = _ask(port, f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Big: {'x' * 40000}\r\n\r\n")
            assert big.split()[1:2] != ["200"]
            told = _ask(port, f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: redline={token}\r\n\r\n", "data: {")
            assert '"stored":4' in told
            slow.close()
        finally:
            server.terminate()
            server.wait(120)
        assert token not in server.stderr.read()


def _ask(port: int, request: str, until: str = "\r\n") -> str:
    """What a server says, up to some words or its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        said = ""
        with suppress(ConnectionError):  # it may hang up before it has read all of a request that is too long
            connection.sendall(request.encode())
            while until not in said or (until.endswith("{") and not said.rstrip().endswith("}")):
                more = connection.recv(65536).decode()
                if not more:
                    break
                said += more
        return said
