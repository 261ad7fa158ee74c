"""`redline tune` against plain loops that a careful hand wrote, on the GPU at hand.

    python scripts/check_tune_on_gpu.py --out FOLDER [--budget 60s] [--only NAME…] [--seconds 600] [--no-snippets]
    python scripts/check_tune_on_gpu.py --out FOLDER --merge EARLIER/tune_on_gpu.jsonl … --table

For each workload of `tune_workloads.py`: the by-hand loop, `redline.tune`, and the snippet of the winner run alone, all in
this one call and one after the other. The winner must have an interval and reach at least 0.95 times the hand's speed, its
snippet must run within 5 % of what tune measured, and failed trials may take a tenth of the budget. Where nothing is surely
faster than the baseline there is no winner, and the baseline is what must be as fast.

Each row is written as soon as it is known: a line of `tune_on_gpu.jsonl` and the table `tune_on_gpu.md`; each search's report
and JSON go beside them. Several calls into one folder make one table, and `--merge` adds the rows of other folders. Every
process compiles from an empty cache of its own, so neither the hand nor the tuner profits from what the other one compiled.
With `--hands-at-once` the loops by hand of all workloads compile at the same time, and are then timed one by one while the
others stand still.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from raw_records import RawRecords
from tune_workloads import WORKLOADS

import redline
from redline.api.workspace import Workspace
from redline.cli.progress import LiveTune
from redline.launch import Door, open_door
from redline.model.spec import LaunchSpec
from redline.model.units import parse_seconds

FILE = Path(__file__).with_name("tune_workloads.py")
AT_LEAST, WITHIN, MOST_FAILED = 0.95, 0.05, 0.1
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
HAND_S, SNIPPET_S, ENDING_S = 60.0, 45.0, 15.0
"""What a loop by hand, a snippet, and starting and ending a search are expected to take before they were seen."""
HANDS_S = 150.0
"""For all loops by hand to compile at the same time; one that takes longer is left out of the row."""
Row = dict[str, Any]
Key = tuple[str, str]
"""Workload and budget."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tune"))
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out what would end later than this")
    parser.add_argument("--no-snippets", action="store_true", help="do not run the winners' code alone")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="JSONL", help="add rows of earlier calls")
    parser.add_argument(
        "--keep-hand", action="store_true", help="use the by-hand figures of earlier rows, and mark them"
    )
    parser.add_argument(
        "--hands-at-once", action="store_true", help="compile all loops by hand at the same time, to save time"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "tune_on_gpu.jsonl"
    rows = rows_of([*given.merge, file])
    names = [] if given.table else given.only or list(WORKLOADS)
    with RawRecords(given.out) as given.raw:
        for row in checked_rows(names, given, rows):
            rows[row["name"], row["budget"]] = row
            write_rows(rows.values(), given.out)
            given.raw.write()
            print(f"{row['name']}: {row['wall_s']:.0f} s in all\n", flush=True)
    write_rows(rows.values(), given.out)
    print(table_of(rows.values()))


def checked_rows(names: list[str], given: argparse.Namespace, earlier: dict[Key, Row]) -> Iterator[Row]:
    """One row for each workload for which there is time."""
    ends_at = time.perf_counter() + given.seconds
    left_out, broken = [], []
    at_once = hands_of(names, HANDS_S) if given.hands_at_once else {}
    with contextlib.closing(open_door(LaunchSpec())) as door:
        for name in names:
            started = time.perf_counter()
            known = next((row["hand"] for (other, _), row in earlier.items() if other == name), None)
            kept = at_once.get(name) or (known if given.keep_hand else None)
            if started + expected_s(given, known, kept) > ends_at:
                left_out.append(name)
                continue
            hand = kept or hand_of(name, ends_at - started)
            try:
                document = searched(name, given, door)
            except Exception:  # the rows of other workloads are worth having all the same
                traceback.print_exc()
                broken.append(name)
                continue
            row = row_of(name, given, hand, document)
            yield {
                **row,
                "hand_is_earlier": kept is not None and name not in at_once,
                "wall_s": time.perf_counter() - started,
            }
    for what, those in (("left out, as they would not end in time", left_out), ("the search broke", broken)):
        if those:
            print(f"{what}: {' '.join(those)}", flush=True)


def expected_s(given: argparse.Namespace, known: Row | None, kept: Row | None) -> float:
    """How long a workload takes from here, by what the loop by hand took earlier."""
    hand_s = 0.0 if kept else known["seconds"] if known else HAND_S
    return hand_s + parse_seconds(given.budget) + ENDING_S + (0.0 if given.no_snippets else SNIPPET_S)


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


def hand_of(name: str, seconds: float) -> Row:
    """Items per second of each loop by hand, timed one after the other; 0 where one does not run."""
    started = time.perf_counter()
    rates = {}
    for variant in WORKLOADS[name].by_hand:
        with empty_cache():
            said = output_of([str(FILE), name, variant], seconds)
        rates[variant] = WORKLOADS[name].batch / float(said) if said is not None else 0.0
    print(f"{name}: by hand {', '.join(f'{variant} {rate:,.0f}/s' for variant, rate in rates.items())}", flush=True)
    return {"rates": rates, "seconds": time.perf_counter() - started}


def hands_of(names: list[str], seconds: float) -> dict[str, Row]:
    """The same for several workloads, compiled at the same time and timed alone; those missing that did not get ready."""
    started = time.perf_counter()
    ends_at = started + seconds
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="hand-cache-", ignore_cleanup_errors=True) as folder:
        loops = [Hand(name, variant, folder) for name in names for variant in WORKLOADS[name].by_hand]
        for loop in loops:
            loop.wait(ends_at - time.perf_counter())
        for loop in loops:
            loop.time()
        for name in names:
            rates = {loop.variant: loop.rate for loop in loops if loop.name == name}
            if all(rate is not None for rate in rates.values()):
                found[name] = {"rates": rates, "seconds": time.perf_counter() - started}
            print(f"{name}: by hand {rates}", flush=True)
    return found


class Hand:
    """A loop by hand in a process of its own, which compiles, stands still, and is timed when told to."""

    def __init__(self, name: str, variant: str, folder: str) -> None:
        self.name, self.variant = name, variant
        self.rate: float | None = None
        self.said: queue.Queue[str] = queue.Queue()
        caches = {cache: f"{folder}/{name}-{variant}/{cache}" for cache in CACHES}
        self.process = subprocess.Popen(
            [sys.executable, str(FILE), name, variant, "--wait"], env={**os.environ, **caches}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(line.strip())
        self.said.put("")

    def wait(self, seconds: float) -> None:
        """Until it is ready; a loop that is not in time is ended, so that it does not compile beside the others' timing."""
        with contextlib.suppress(queue.Empty):
            while (line := self.said.get(timeout=max(seconds, 0.1))) not in ("ready", ""):
                pass
            if line == "ready":
                return
        self.process.kill()
        self.process.wait()

    def time(self) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            said = self.said.get()
            self.rate = WORKLOADS[self.name].batch / float(said) if said else None
        self.process.wait()


def searched(name: str, given: argparse.Namespace, door: Door) -> Row:
    """The document of the search, with the speed of the winner's own code."""
    # A relative path: it is part of the model's name in what is published.
    settings = WORKLOADS[name].settings(os.path.relpath(FILE))
    base = f"{name}_{given.budget}"
    with empty_cache(), LiveTune() as observer:
        with Workspace(observer=observer, door=door, history=given.raw.history(base)) as workspace:
            result = redline.tune(**settings, device="cuda", budget=given.budget, name=base, workspace=workspace)
        print(str(result), flush=True)
    document = result.document()
    (given.out / f"{base}.txt").write_text(str(result))
    (given.out / f"{base}.json").write_text(json.dumps(document, indent=1))
    file = given.out / f"{base}_snippet.py"
    return {**document, "alone": None if given.no_snippets else run_snippet(document["snippet"], file)}


def run_snippet(code: str | None, file: Path) -> float | None:
    """Items per second of the winner's own code."""
    if code is None:
        return None
    file.write_text(code)
    with empty_cache():
        said = output_of([str(file)], SNIPPET_S * 4)
    return float(said.split()[0]) if said is not None else 0.0


def output_of(command: list[str], seconds: float) -> str | None:
    """The last line that a script prints; None where it fails or takes longer than this."""
    try:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=None if math.isinf(seconds) else seconds
        )
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command)} took longer than {seconds:.0f} s", flush=True)
        return None
    if done.returncode:
        print(f"{' '.join(command)} fails: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    return done.stdout.splitlines()[-1]


def row_of(name: str, given: argparse.Namespace, hand: Row, document: Row) -> Row:
    winner, leader, spent, alone = (document[key] for key in ("winner", "leader", "spent", "alone"))
    best_by_hand = max(hand["rates"].values())
    baseline = next((each for each in document["ranking"] if each["recipe"] == "baseline"), None)
    kept = winner or baseline
    found = kept["throughput_per_s"] if kept else 0.0
    failed = spent["failed"] / parse_seconds(given.budget)
    is_fast = found >= AT_LEAST * best_by_hand
    runs_alone = alone is None or abs(alone / found - 1) <= WITHIN
    return {
        "name": name,
        "budget": given.budget,
        "task": WORKLOADS[name].task,
        "batch": WORKLOADS[name].batch,
        "device": document["device_name"],
        "hand": hand,
        "by_hand": best_by_hand,
        "found": found,
        "of_hand": found / best_by_hand if best_by_hand else None,
        "recipe": kept["recipe"] if kept else None,
        "leader": leader["recipe"] if leader else None,
        "ratio": [leader["low"], leader["ratio"], leader["high"]] if leader else None,
        "has_winner": winner is not None,
        "failed": failed,
        "snippet": alone / found if alone is not None else None,
        "seconds": document["seconds"],
        "spent": spent,
        "untried": document["untried"],
        "fine": bool(kept and best_by_hand and is_fast and runs_alone and failed <= MOST_FAILED),
    }


def rows_of(files: Iterable[Path]) -> dict[Key, Row]:
    """The rows of earlier calls; a later one of the same workload and budget counts."""
    lines = (line for file in files if file.exists() for line in file.read_text().splitlines())
    return {(row["name"], row["budget"]): row for row in map(json.loads, lines)}


def write_rows(rows: Iterable[Row], out: Path) -> None:
    rows = list(rows)
    (out / "tune_on_gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "tune_on_gpu.md").write_text(table_of(rows) + "\n")


COLUMNS = (
    "workload", "budget", "by hand, items/s", "tune, items/s", "tune / hand", "vs baseline", "failed", "snippet / tune",
    "seconds", "recipe", "spent on", "aims",
)  # fmt: skip


def table_of(rows: Iterable[Row]) -> str:
    """In the order of the workloads, each budget by itself, with how many reach every aim."""
    order = list(WORKLOADS)
    rows = sorted(rows, key=lambda row: (parse_seconds(row["budget"]), order.index(row["name"])))
    budgets = dict.fromkeys(row["budget"] for row in rows)
    counts = [
        f"Budget {budget}: {sum(row['fine'] for row in of)} of {len(of)} reach every aim, "
        f"{fast} {'is' if fast == 1 else 'are'} at least as fast as by hand."
        for budget in budgets
        for of in [[row for row in rows if row["budget"] == budget]]
        for fast in [sum((row["of_hand"] or 0) >= 1 for row in of)]
    ]
    head = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*head, *map(line_of, rows), "", *counts])


def line_of(row: Row) -> str:
    return "| {} |".format(" | ".join(cells_of(row)))


def cells_of(row: Row) -> list[str]:
    spent = ", ".join(
        f"{what} {seconds:.0f}" for what, seconds in row["spent"].items() if what != "reserved" and seconds >= 0.5
    )
    hand = (
        f"{row['by_hand']:,.0f}{' (earlier)' if row['hand_is_earlier'] else ''}" if row["by_hand"] else "does not run"
    )
    return [
        f"{row['name']}, batch {row['batch']}",
        row["budget"],
        hand,
        f"{row['found']:,.0f}",
        f"{row['of_hand']:.2f}" if row["of_hand"] else "–",
        told_ratio(row),
        f"{row['failed']:.0%}",
        f"{row['snippet']:.2f}" if row["snippet"] is not None else "–",
        f"{row['seconds']:.0f}",
        row["recipe"] or "–",
        spent,
        "met" if row["fine"] else "NOT met",
    ]


def told_ratio(row: Row) -> str:
    if row["ratio"] is None:
        return "nothing was timed"
    low, ratio, high = row["ratio"]
    interval = f"({low:.2f}–{high:.2f})" if low is not None else "(no interval)"
    if row["has_winner"]:
        return f"{ratio:.2f}× {interval}"
    return f"no winner; {row.get('leader') or row['recipe']} {ratio:.2f}× {interval}"


if __name__ == "__main__":
    main()
