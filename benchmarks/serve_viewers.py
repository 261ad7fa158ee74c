"""Do viewers of `redline serve` disturb a measurement? One worker times its steps while 50 viewers come and go.

    python benchmarks/serve_viewers.py [--viewers 50] [--seconds 60] [--device auto] [--model simple_cnn] [--threads 1] [--pin]

One worker measures from the beginning to the end, as `redline race` does, in blocks of 1.5 s; between blocks viewers are
connected and sent away, in random order, so that each round has a block with viewers, one without, and one where the
command to the viewers does nothing. Meanwhile a search writes to the history as `redline tune` does (its steps are
simulated, its seconds and its writing are real). Every viewer receives all events, loads the tables anew when the page in a
browser would, and follows a link every 20 s. Printed are the paired ratios with their 95 % intervals, of the median
step and of the mean step, and what the server and the viewers cost; the viewers, which in life are browsers elsewhere,
run on this machine too. `--pin` gives the worker a core of its own. Takes about 4.5 times `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from redline.analyze.statistics import paired_ratio
from redline.api.workspace import Workspace
from redline.protocol import BlockReply, Measure, Prepare, PreparedReply
from redline.questions import SwitchChoice
from redline.record import Block
from redline.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape

BLOCK_S = 1.5
SETTLE_S = 0.7
LINK_EVERY_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="with viewers, and as long without")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="simple_cnn")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="the worker alone on one core")
    parser.add_argument("--as", dest="role", choices=["viewers", "writer"], help="what this script starts itself as")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.role == "viewers":
        asyncio.run(Viewers(arguments.port, arguments.viewers).obey())
    elif arguments.role == "writer":
        search_for_ever()
    else:
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        os.environ["REDLINE_STORE"] = str(Path(folder) / "history.sqlite")
        workspace = stack.enter_context(Workspace(keep=False))
        workload = WorkloadSpec(model=arguments.model, batch=arguments.batch)
        asked = RunSpec(workload=workload, device=arguments.device, threads=arguments.threads)
        (spec,) = workspace.checked([asked])
        session = workspace.door(LaunchSpec()).open(spec)
        stack.callback(session.close)
        prepared = session.ask(Prepare(spec=spec))
        assert isinstance(prepared, PreparedReply), prepared
        worker, cores = psutil.Process().children(recursive=True)[-1], sorted(os.sched_getaffinity(0))
        if arguments.pin:
            worker.cpu_affinity(cores[:1])
            os.sched_setaffinity(0, cores[1:])
        writer = stack.enter_context(started("writer", arguments))
        time.sleep(10)  # the first trials are there
        server = stack.enter_context(subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True))
        assert server.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", server.stderr.readline())
        assert found is not None
        arguments.port = int(found[1])
        viewers = stack.enter_context(started("viewers", arguments))
        for each in (writer, server, viewers):
            stack.callback(each.terminate)
        measured = Rounds(session, viewers, [psutil.Process(each.pid) for each in (server, viewers, writer)])
        rounds = max(5, round(arguments.seconds / BLOCK_S))
        for number in range(rounds):
            measured.round(number)
        measured.tell(arguments.viewers)


SERVE = [sys.executable, "-m", "redline", "serve", "--port", "0"]


def started(role: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    words = ["--as", role, "--port", str(arguments.port), "--viewers", str(arguments.viewers)]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__, *words], stdin=pipe, stdout=pipe, text=True)


class Rounds:
    """Blocks with viewers, without, and with a command that changes nothing."""

    def __init__(self, session: Any, viewers: subprocess.Popen[str], processes: list[psutil.Process]) -> None:
        self._session, self._viewers, self._processes = session, viewers, processes
        self._blocks: dict[str, dict[int, Block]] = {"on": {}, "off": {}, "nothing": {}}
        self._cpu: dict[str, list[list[float]]] = {"on": [], "off": [], "nothing": []}
        self._chance = random.Random(0)

    def round(self, number: int) -> None:
        for command in self._chance.sample(list(self._blocks), 3):
            self._order("on" if command == "on" else "off")
            if command == "nothing":
                self._order("off")
            time.sleep(SETTLE_S)
            before = self._spent()
            reply = self._session.ask(Measure(kind="throughput", seconds=BLOCK_S, round=number))
            assert isinstance(reply, BlockReply), reply
            self._blocks[command][number] = reply.block
            self._cpu[command].append([after - first for after, first in zip(self._spent(), before, strict=True)])

    def _order(self, command: str) -> None:
        assert self._viewers.stdin is not None
        assert self._viewers.stdout is not None
        self._viewers.stdin.write(f"{command}\n")
        self._viewers.stdin.flush()
        assert self._viewers.stdout.readline().strip() == command

    def _spent(self) -> list[float]:
        return [sum(each.cpu_times()[:2]) for each in self._processes]

    def tell(self, viewers: int) -> None:
        steps = {
            "median": lambda block: median(block.samples),
            "mean": lambda block: sum(block.samples) / len(block.samples),
        }
        for name, step in steps.items():
            found = {each: {key: step(block) for key, block in blocks.items()} for each, blocks in self._blocks.items()}
            print(f"{name} step without viewers {median(found['off'].values()) * 1e3:.3f} ms")
            for command, words in (("on", f"with {viewers} viewers"), ("nothing", "with none, again")):
                ratio = paired_ratio(found[command], found["off"])
                assert ratio is not None
                low, change, high = (each - 1 for each in (ratio.low, ratio.ratio, ratio.high))
                print(f"  {words:<18} {change:+.2%} ({low:+.2%} to {high:+.2%}), {ratio.rounds} rounds")
        for command, spent in self._cpu.items():
            seconds = BLOCK_S * len(spent)
            shares = (f"{sum(column) / seconds:.1%}" for column in zip(*spent, strict=True))
            told = ", ".join(
                f"{who} {share}" for who, share in zip(("server", "viewers", "writer"), shares, strict=True)
            )
            waited = sum(block.waited_s or 0.0 for block in self._blocks[command].values()) / seconds
            print(f"of one core, {command}: {told}; the worker waited for a core {waited:.2%} of the time")


class Viewers:
    """As many connections as viewers, in one process that is told to connect them and to end them."""

    def __init__(self, port: int, number: int) -> None:
        self._port, self._number = port, number
        self._tasks: list[asyncio.Task[None]] = []
        self._events = 0

    async def obey(self) -> None:
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if command == "on" and not self._tasks:
                welcomed = [asyncio.Event() for _ in range(self._number)]
                self._tasks = [asyncio.create_task(self._view(each)) for each in welcomed]
                await asyncio.wait_for(asyncio.gather(*(each.wait() for each in welcomed)), 30)
            elif command == "off" and self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._tasks = []
            print(command, flush=True)

    async def _view(self, welcome: asyncio.Event) -> None:
        """What serve.js does in a browser, and a person who follows links now and then."""
        page = await self._get("/")
        links = re.findall(r'href="(/(?:series|records)/[^"]+)"', page)
        reader, writer = await self._connected("/events")
        clicks = asyncio.create_task(self._click(links))
        pending: asyncio.Task[None] | None = None
        seen = None
        try:
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                state = json.loads(line[6:])
                last, seen = seen, (state["latest"], len(state["records"]), state["stored"])
                welcome.set()
                if last is not None and seen != last and (pending is None or pending.done()):
                    pending = asyncio.create_task(self._reload(1 + 7 * random.random()))
        finally:
            for task in (clicks, pending):
                if task is not None:
                    task.cancel()
            writer.close()

    async def _click(self, links: list[str]) -> None:
        while links:
            await asyncio.sleep(random.expovariate(1 / LINK_EVERY_S))
            await self._get(random.choice(links))

    async def _reload(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._get("/")

    async def _get(self, path: str) -> str:
        reader, writer = await self._connected(path, "Connection: close\r\n")
        with suppress(ConnectionError):
            answer = (await reader.read()).decode()
            assert answer.startswith("HTTP/1.1 200"), answer[:200]
            return answer
        writer.close()
        return ""

    async def _connected(self, path: str, headers: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode())
        return reader, writer


class PacedSession(FakeSession):
    """A simulated worker that takes its seconds."""

    def wait(self, on_progress: Any = None, timeout_s: float | None = None) -> Any:
        reply = super().wait(on_progress, timeout_s)
        time.sleep(max(0.0, self._world.clock_s - (time.monotonic() - STARTED)))
        return reply


class PacedDoor(FakeDoor):
    def open(self, spec: RunSpec | None = None) -> FakeSession:
        opened = super().open(spec)
        return PacedSession(opened._bench, opened._world)


STARTED = time.monotonic()


def search_for_ever() -> None:
    import redline

    names = {"fp16": "precision", "channels-last": "layout", "compile": "compile", "cudnn-benchmark": "convolution"}
    truth = Landscape(
        step_s=lambda spec: 0.01 * 0.8 ** len(spec.recipe.switches),
        choices=tuple(SwitchChoice(switch=switch, family=family) for switch, family in names.items()),
        offset_sigma=0.003,
        compile_s=3.0,
    )
    door = PacedDoor(truth)
    for number in range(1000):
        with Workspace(door=door) as workspace:
            settings: dict[str, Any] = {"budget": "2m", "launch": {"door": "fake"}, "clock": lambda: door.clock_s}
            redline.tune(f"model-{number}", batch=32, **settings, workspace=workspace)


if __name__ == "__main__":
    main()
