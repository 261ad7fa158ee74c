"""Checks of Redline on the GPU at hand, against plain PyTorch, vendors' tools and planted faults.

    python tools/gpu/check.py                            what there is to check, row by row
    python tools/gpu/check.py loop energy --out FOLDER   some checks
    python tools/gpu/check.py tune --only unet decoder --budget 5m --out FOLDER
    python tools/gpu/check.py loop --device cpu          tiny, to see that a check runs

Each row is written as soon as it is known: a line of NAME.jsonl and a line of the table NAME.md, where rows of earlier calls
into the same folder stay. `records.redline.gz` has the raw records of all of them. `--seconds` leaves out rows that would not
end in time, and says which. Exits with 1 where a row is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import explaining
import generation
import judging
import measuring
import planted
import training
import tuning
import watching
from asking import Ask, Figures, Outcome
from records import RawRecords

MOST_SHOWN = 30
SIGNS = {True: "ok  ", False: "NOT ", None: "    "}


@dataclass(frozen=True)
class Check:
    does: Callable[[Ask, str, Any], Outcome]
    """Its docstring says what is checked. It gets the name of the row and what the row is about."""
    rows: Mapping[str, Any]
    seconds: float
    """What a row takes on an H200; the longest row of a call counts where that took longer."""


CHECKS = {
    "loop": Check(measuring.against_plain_loop, measuring.LOOPS, 25),
    "micro": Check(measuring.against_micro_script, measuring.MICRO, 25),
    "ranks": Check(measuring.against_torchrun, measuring.DOORS, 25),
    "neighbours": Check(measuring.beside_neighbours, measuring.NEIGHBOURED, 30),
    "batch": Check(measuring.largest_batch, measuring.BATCHES, 90),
    "energy": Check(measuring.energy, measuring.METERED, 20),
    "smi": Check(measuring.against_nvidia_smi, {"busy": None}, 18),
    "shared": Check(measuring.company_on_the_card, {"alone": False, "beside another": True}, 10),
    "memory": Check(measuring.memory_by_kind, measuring.REMEMBERED, 10),
    "profile": Check(explaining.profile, explaining.CASES, 15),
    "follow": Check(explaining.follow, explaining.FOLLOWED, 20),
    "planted": Check(planted.planted, planted.PLANTED, 15),
    "tool": Check(explaining.vendor_tool, {"ncu": True, "nsys": False}, 60),
    "ceilings": Check(explaining.ceilings, {"all formats": None}, 25),
    "roofline": Check(explaining.roofline, explaining.ROOFLINES, 60),
    "train": Check(training.train, training.ROWS, 130),
    "generate": Check(generation.generate, generation.ROWS, 45),
    "load": Check(generation.load, generation.LOADS, 30),
    "tune": Check(tuning.tune, tuning.ROWS, 120),
    "numerics": Check(judging.numerics, judging.MODELS, 15),
    "gate": Check(judging.gate, judging.SLOWDOWNS, 70),
    "watch": Check(watching.fault, watching.FAULTS, 12),
    "watch-cost": Check(watching.cost, {"5 ms on the device": None}, 25),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CHECKS, []], metavar="NAME")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="some rows of one check")
    parser.add_argument("--out", type=Path, help="the folder for figures and records; a temporary one by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out rows that would end later than this")
    parser.add_argument("--budget", default="60s", help="of each search")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    rows = {name: list(CHECKS[name].rows) for name in asked.names}
    if asked.only:
        if unknown := [row for row in asked.only if not any(row in known for known in rows.values())]:
            parser.error(
                f"no row {', '.join(unknown)}; there are {', '.join(row for known in rows.values() for row in known)}"
            )
        rows = {name: [row for row in known if row in asked.only] for name, known in rows.items()}
    if not asked.names:
        for name, check in CHECKS.items():
            shown = list(check.rows)[:MOST_SHOWN]
            more = f" and {len(check.rows) - MOST_SHOWN} more" if len(check.rows) > MOST_SHOWN else ""
            print(f"{name:11} {(check.does.__doc__ or '').splitlines()[0]}\n{'':11}   {', '.join(shown)}{more}")
        return 0
    out = asked.out or Path(tempfile.mkdtemp(prefix="gpu-checks-"))
    out.mkdir(parents=True, exist_ok=True)
    ends_at, wrong, count = time.monotonic() + asked.seconds, 0, 0
    with RawRecords(out) as raw:
        ask = Ask(device=asked.device, out=out.absolute(), budget=asked.budget, raw=raw)
        for name, chosen in rows.items():
            for is_good in checked(name, chosen, ask, ends_at):
                count, wrong = count + 1, wrong + (is_good is False)
            raw.write()
    print(f"{count - wrong} of {count} as they should be; figures are in {out}")
    return 1 if wrong else 0


def checked(name: str, chosen: list[str], ask: Ask, ends_at: float) -> list[bool | None]:
    check, file = CHECKS[name], ask.out / f"{name}.jsonl"
    known = {row["row"]: row for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    ask.chosen, ask.known, longest_s = tuple(chosen), known, check.seconds
    found: list[bool | None] = []
    for row in chosen:
        started = time.monotonic()
        if started + longest_s > ends_at:
            print(f"{name} {row}: left out, as it would not end in time", flush=True)
            continue
        try:
            is_good, figures = check.does(ask, row, check.rows[row])
        except Exception as error:  # the other rows are worth having all the same
            traceback.print_exc()
            is_good, figures = False, {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        longest_s = max(longest_s, time.monotonic() - started)
        known[row] = {"row": row, "good": is_good, **figures, "took_s": round(time.monotonic() - started, 1)}
        found.append(is_good)
        print(f"{SIGNS[is_good]}{name} {', '.join(cells(known[row]))}", flush=True)
        file.write_text("".join(json.dumps(each, default=str) + "\n" for each in known.values()))
        ask.write(f"{name}.md", table(list(known.values())))
    return found


def cells(row: Figures) -> list[str]:
    return [str(row["row"]), *(f"{key} {shown(value)}" for key, value in row.items() if is_shown(key, value))]


def is_shown(key: str, value: Any) -> bool:
    return key not in ("row", "good") and value is not None and not isinstance(value, dict | list)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[Figures]) -> str:
    """Every plain figure; what is nested stands in the lines of JSON only."""
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if is_shown(key, value)))
    lines = [f"| row | {' | '.join(columns)} | as it should be |", "|---|" + "---|" * (len(columns) + 1)]
    for row in rows:
        values = [shown(row[key]) if is_shown(key, row.get(key)) else "–" for key in columns]
        judged = {True: "yes", False: "**no**", None: "–"}[row["good"]]
        lines.append(f"| {row['row']} | {' | '.join(values)} | {judged} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
