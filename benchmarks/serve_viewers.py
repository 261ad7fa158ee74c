"""Do viewers of `redline serve` disturb a measurement? One worker times its steps while 50 viewers watch, and while nobody does.

    python benchmarks/serve_viewers.py [--viewers 50] [--seconds 60] [--device auto] [--model simple_cnn] [--threads 1] [--pin] [--idle]

One worker measures from the beginning to the end, in blocks of half a second. Before each, the server and its viewers, who stay
connected, are let run or are stopped (SIGCONT, SIGSTOP): a pair of blocks with and without them, in random order, takes little
more than a second, so that what else goes on at the machine hits both. Work that fell due while they were stopped is done when
they run, so that a block with viewers holds more of it than in life. Meanwhile a search writes to the history as `redline tune`
does (its steps are simulated, its seconds and its writing are real). Every viewer receives all events, loads the tables anew
when the page in a browser would, and follows a link every 20 s; in life viewers are browsers elsewhere, here they
run on this machine too.

One line tells the median of the paired ratios, with viewers over without, and its 95 % interval (bootstrap of the pairs): of the
median step, of the mean step, and of the worker's processor time per step. `control` is the same for pairs of blocks without
viewers. `--pin` gives the worker a core of its own; `--idle` starts `redline serve --idle`. Takes about 3.5 times `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil

from redline.api.workspace import Workspace
from redline.model.protocol import BlockReply, Measure, Prepare, PreparedReply
from redline.model.questions import SwitchChoice
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape

BLOCK_S = 0.5
CONTROLS = 4
"""One pair of blocks without viewers after so many pairs."""
BOOTSTRAPS = 4000
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
    parser.add_argument("--idle", action="store_true", help="the server as 'redline serve --idle'")
    parser.add_argument("--as", dest="role", choices=["viewers", "writer"], help="what this script starts itself as")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.role == "viewers":
        asyncio.run(Viewers(arguments.port, arguments.viewers).watch())
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
        worker, cores = psutil.Process(session.pid), sorted(os.sched_getaffinity(0))
        if arguments.pin:
            worker.cpu_affinity(cores[:1])
            os.sched_setaffinity(0, cores[1:])
        writer = stack.enter_context(started("writer", arguments))
        time.sleep(10)  # the first trials are there
        server = stack.enter_context(
            subprocess.Popen(SERVE + ["--idle"] * arguments.idle, stderr=subprocess.PIPE, text=True)
        )
        assert server.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", server.stderr.readline())
        assert found is not None
        arguments.port = int(found[1])
        viewers = stack.enter_context(started("viewers", arguments))
        for each in (writer, server, viewers):
            stack.callback(each.kill)  # a stopped process does not hear a kinder signal
        assert viewers.stdout is not None
        assert viewers.stdout.readline().strip() == "connected"
        measured = Pairs(session, [psutil.Process(each.pid) for each in (server, viewers)])
        for number in range(max(10, round(arguments.seconds / BLOCK_S))):
            measured.pair(number)
        measured.tell(arguments.viewers)


SERVE = [sys.executable, "-m", "redline", "serve", "--port", "0"]
FIGURES = ("median step", "mean step", "processor time")


def started(role: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    words = ["--as", role, "--port", str(arguments.port), "--viewers", str(arguments.viewers)]
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)


class Pairs:
    """Blocks with viewers and without, one after the other."""

    def __init__(self, session: Any, watching: list[psutil.Process]) -> None:
        self._session, self._watching = session, watching
        self._ratios: dict[str, list[list[float]]] = {"viewers": [], "control": []}
        self._spent = {True: [0.0] * len(watching), False: [0.0] * len(watching)}
        self._seconds = {True: 0.0, False: 0.0}
        self._chance = random.Random(0)

    def pair(self, number: int) -> None:
        order = [True, False] if self._chance.random() < 0.5 else [False, True]
        found = {with_viewers: self._block(number, with_viewers) for with_viewers in order}
        self._note("viewers", found[True], found[False])
        if number % CONTROLS == 0:
            self._note("control", *(self._block(number, False) for _ in range(2)))

    def _note(self, what: str, one: list[float], other: list[float]) -> None:
        self._ratios[what].append([math.log(a / b) for a, b in zip(one, other, strict=True)])

    def _block(self, number: int, with_viewers: bool) -> list[float]:
        """The median step, the mean step and the processor time of a step."""
        for each in self._watching:
            each.resume() if with_viewers else each.suspend()
        started, spent = time.perf_counter(), self._watchers_s()
        reply = self._session.ask(Measure(kind="throughput", seconds=BLOCK_S, round=number))
        assert isinstance(reply, BlockReply), reply
        samples, processor_s = reply.block.samples, reply.block.cpu_s or 1e-9
        self._seconds[with_viewers] += time.perf_counter() - started
        gone = [after - first for after, first in zip(self._watchers_s(), spent, strict=True)]
        self._spent[with_viewers] = [a + b for a, b in zip(self._spent[with_viewers], gone, strict=True)]
        return [median(samples), fmean(samples), processor_s / len(samples)]

    def _watchers_s(self) -> list[float]:
        return [sum(each.cpu_times()[:2]) for each in self._watching]

    def tell(self, viewers: int) -> None:
        for what, pairs in self._ratios.items():
            told = [
                f"{name} {_percent(column)}" for name, column in zip(FIGURES, zip(*pairs, strict=True), strict=True)
            ]
            print(f"{f'with {viewers} viewers' if what == 'viewers' else what}: {'; '.join(told)}; {len(pairs)} pairs")
        shares = [spent / self._seconds[True] for spent in self._spent[True]]
        print(f"of one core, while they run: server {shares[0]:.1%}, viewers {shares[1]:.1%}")


def _percent(logs: Sequence[float]) -> str:
    """The median change with the interval of its bootstrap."""
    values = np.asarray(logs)
    drawn = np.median(np.random.default_rng(0).choice(values, (BOOTSTRAPS, values.size)), axis=1)
    low, high = np.expm1(np.quantile(drawn, (0.025, 0.975)))
    return f"{math.expm1(median(logs)):+.2%} ({low:+.2%} to {high:+.2%})"


class Viewers:
    """As many connections as viewers, in one process."""

    def __init__(self, port: int, number: int) -> None:
        self._port, self._number = port, number

    async def watch(self) -> None:
        welcomed = [asyncio.Event() for _ in range(self._number)]
        views = [asyncio.create_task(self._view(each)) for each in welcomed]
        await asyncio.wait_for(asyncio.gather(*(each.wait() for each in welcomed)), 120)
        print("connected", flush=True)
        await asyncio.gather(*views)

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
