"""`redline tune` against plain loops that a careful hand wrote, on the GPU at hand.

    python scripts/check_tune_on_gpu.py [--budget 60s] [--only NAME…] [--out FOLDER] [--no-snippets]

For each workload of `tune_workloads.py`: the by-hand loop, `redline.tune`, and the snippet of the winner run alone, all in
this one call. The winner must have an interval and reach at least 0.95 times the hand's speed, its snippet must run within
5 % of what tune measured, and failed trials may take a tenth of the budget. A short table comes last; each search's report
and JSON go to the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tune_workloads import WORKLOADS, Workload

import redline
from redline.api.workspace import Workspace
from redline.cli.progress import LiveTune
from redline.launch import Door, open_door
from redline.spec import LaunchSpec
from redline.units import parse_seconds

FILE = Path(__file__).with_name("tune_workloads.py")
AT_LEAST, WITHIN, MOST_FAILED = 0.95, 0.05, 0.1
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--out", type=Path, default=Path("tune"))
    parser.add_argument("--no-snippets", action="store_true", help="do not run the winners' code alone")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with contextlib.closing(open_door(LaunchSpec())) as door:
        for name in given.only or WORKLOADS:
            started = time.perf_counter()
            rows.append(checked(name, given.budget, given.out, door, with_snippet=not given.no_snippets))
            print(f"{name}: {time.perf_counter() - started:.0f} s in all\n{told(rows[-1])}", flush=True)
            (given.out / "tune_on_gpu.json").write_text(json.dumps(rows, indent=1))
    table = "\n".join([HEADER, *map(told, rows)])
    (given.out / "tune_on_gpu.txt").write_text(table + "\n")
    fine = sum(row["fine"] for row in rows)
    print(f"\n== budget {given.budget}: {fine} of {len(rows)} fine\n{table}")


def checked(name: str, budget: str, out: Path, door: Door, *, with_snippet: bool) -> Row:
    workload = WORKLOADS[name]
    hand = {variant: by_hand(name, variant) for variant in workload.by_hand}
    print(f"{name}: by hand {', '.join(f'{variant} {rate:,.0f}/s' for variant, rate in hand.items())}", flush=True)
    with LiveTune() as observer:
        workspace = Workspace(observer=observer, door=door)
        result = redline.tune(**workload.settings(str(FILE)), device="cuda", budget=budget, workspace=workspace)
    print(str(result), flush=True)
    document = result.document()
    (out / f"{name}.txt").write_text(str(result))
    (out / f"{name}.json").write_text(json.dumps(document, indent=1))
    alone = run_snippet(document["snippet"], out / f"{name}_snippet.py") if with_snippet else None
    return row_of(name, workload, document, max(hand.values()), alone, parse_seconds(budget))


def by_hand(name: str, variant: str) -> float:
    """Items per second; 0 where the loop does not run."""
    done = subprocess.run([sys.executable, str(FILE), name, variant], capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: the {variant} loop by hand fails: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return 0.0
    return WORKLOADS[name].batch / float(done.stdout.splitlines()[-1])


def run_snippet(code: str | None, file: Path) -> float | None:
    """Items per second of the winner's own code."""
    if code is None:
        return None
    file.write_text(code)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    if done.returncode:
        print(f"{file.name} fails: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return 0.0
    return float(done.stdout.splitlines()[-1].split()[0])


def row_of(
    name: str, workload: Workload, document: dict[str, Any], by_hand: float, alone: float | None, budget_s: float
) -> Row:
    winner, spent = document["winner"], document["spent"]
    found = winner["throughput_per_s"] if winner else document["leader"]["throughput_per_s"]
    is_fast = found >= AT_LEAST * by_hand
    runs_alone = alone is None or abs(alone / found - 1) <= WITHIN
    failed = spent["failed"] / budget_s
    return {
        "name": name,
        "task": workload.task,
        "by_hand": by_hand,
        "found": found,
        "of_hand": found / by_hand if by_hand else None,
        "recipe": winner["recipe"] if winner else None,
        "ratio": [winner["low"], winner["ratio"], winner["high"]] if winner else None,
        "failed": failed,
        "snippet": alone / found if alone is not None else None,
        "seconds": document["seconds"],
        "spent": spent,
        "fine": bool(winner and is_fast and runs_alone and failed <= MOST_FAILED),
    }


HEADER = (
    f"    {'workload':<18} {'by hand':>9} {'tune':>9} {'of hand':>8} {'vs baseline':>20} {'failed':>7} "
    f"{'snippet':>8} {'s':>5}  recipe"
)


def told(row: Row) -> str:
    ratio = "no winner" if row["ratio"] is None else "{1:.2f}x ({0:.2f}-{2:.2f})".format(*row["ratio"])
    of_hand = f"{row['of_hand']:.2f}" if row["of_hand"] else "–"
    snippet = "–" if row["snippet"] is None else f"{row['snippet']:.2f}"
    return (
        f"{'ok ' if row['fine'] else 'NOT'} {row['name']:<18} {row['by_hand']:>9,.0f} {row['found']:>9,.0f} {of_hand:>8} "
        f"{ratio:>20} {row['failed']:>6.0%} {snippet:>8} {row['seconds']:>5.0f}  {row['recipe'] or '–'}"
    )


if __name__ == "__main__":
    main()
