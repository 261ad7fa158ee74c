"""`redline tune` against plain loops that a careful hand wrote."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from asking import Ask, Figures, Outcome, within
from tune_workloads import WORKLOADS, Workload

import redline
from redline.model.units import parse_seconds

FILE = Path(__file__).with_name("tune_workloads.py")
ROWS = WORKLOADS
AT_LEAST, SNIPPET_WITHIN, MOST_FAILED = 0.95, 0.05, 0.1
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
HANDS_S = 150.0
"""What the loops by hand of one call get to compile; one that takes longer is left out."""
SNIPPET_S = 180.0


def tune(ask: Ask, name: str, workload: Workload) -> Outcome:
    """`tune` reaches 0.95 of the best loop by hand, its snippet runs as fast as it said, failures take a tenth at most.

    The loops by hand of all rows that were asked for compile at the same time, and are timed one by one while the others
    stand still. Rows of another budget in the same folder lend theirs. Every process begins with an empty compiler cache,
    so neither side profits from what the other has compiled.
    """
    rates = ask.known.get(name, {}).get("by_hand") or hands(ask.chosen).get(name) or {}
    # A relative path, as it is part of the model's name in what is published.
    settings = workload.settings(os.path.relpath(FILE))
    with empty_cache(), ask.workspace(f"{name}_{ask.budget}") as workspace:
        result = redline.tune(**settings, device=ask.device, budget=ask.budget, name=name, workspace=workspace)
    ask.document(result, f"{name}_{ask.budget}")
    found = result.summary
    baseline = next((row for row in found.ranking if row.recipe == "baseline"), None)
    winner, leader = found.winner, found.leader
    kept = winner or baseline
    speed, best = (kept.row.throughput_per_s or 0.0) if kept else 0.0, max(rates.values(), default=0.0)
    alone = snippet_speed(ask, name, found.tune.snippet)
    failed = found.tune.spent.failed / parse_seconds(ask.budget)
    figures: Figures = {
        "budget": ask.budget,
        "found_per_s": speed,
        "of_hand": speed / best if best else None,
        "ratio": leader and leader.ratio,
        "low": leader and leader.low,
        "high": leader and leader.high,
        "has_winner": winner is not None,
        "failed": failed,
        "snippet": alone / speed if alone is not None and speed else None,
        "recipe": kept and kept.recipe,
        "by_hand": rates,
        "spent": msgspec.to_builtins(found.tune.spent),
        "untried": [str(each) for each in found.tune.notes if each.code == "untried"],
    }
    runs_alone = figures["snippet"] is None or within(figures["snippet"] - 1, SNIPPET_WITHIN)
    return bool(best) and speed >= AT_LEAST * best and runs_alone and failed <= MOST_FAILED, figures


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Compile into an empty folder, here and in all processes that begin here, and forget it afterwards."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="tune-cache-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: f"{folder}/{name}" for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


_hands: dict[str, dict[str, float]] = {}


def hands(names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Items per second of each loop by hand, by workload; measured by the first row that asks."""
    if not _hands:
        ends_at = time.monotonic() + HANDS_S
        with tempfile.TemporaryDirectory(prefix="hand-cache-", ignore_cleanup_errors=True) as folder:
            loops = [Hand(name, variant, folder) for name in names for variant in WORKLOADS[name].by_hand]
            for loop in loops:
                loop.wait(ends_at - time.monotonic())
            for loop in loops:
                if (rate := loop.time()) is not None:
                    _hands.setdefault(loop.name, {})[loop.variant] = rate
        print(f"by hand: {_hands}", flush=True)
    return _hands


class Hand:
    """A loop by hand in a process of its own, which compiles, stands still, and is timed when told to."""

    def __init__(self, name: str, variant: str, folder: str) -> None:
        self.name, self.variant = name, variant
        self._lines: queue.Queue[str] = queue.Queue()
        caches = {cache: f"{folder}/{name}-{variant}/{cache}" for cache in CACHES}
        self._process = subprocess.Popen(
            [sys.executable, str(FILE), name, variant, "--wait"], env={**os.environ, **caches}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def wait(self, seconds: float) -> None:
        """Returns when it is ready; ends a loop that is not in time, so that it does not compile beside the timing."""
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(seconds, 0.1))) not in ("ready", ""):
                pass
            if line == "ready":
                return
        self._process.kill()
        self._process.wait()

    def time(self) -> float | None:
        """Items per second; None for a loop that broke or was not in time."""
        if self._process.poll() is not None or self._process.stdin is None:
            return None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._lines.get()
        self._process.wait()
        return WORKLOADS[self.name].batch / float(line) if line else None


def snippet_speed(ask: Ask, name: str, code: str | None) -> float | None:
    """Items per second of the winner's own code in a plain process; 0 where it does not run."""
    if code is None:
        return None
    file = ask.out / f"{name}_{ask.budget}_snippet.py"
    file.write_text(code)
    with empty_cache():
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=SNIPPET_S, check=False)
    if done.returncode:
        print(f"{file} fails: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return 0.0
    return float(done.stdout.splitlines()[-1].split()[0])
