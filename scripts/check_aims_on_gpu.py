"""Where the tuned recipes stand against their aims, and how much more the GPU at hand would allow, in about two minutes.

    python scripts/check_aims_on_gpu.py --out FOLDER [--only NAME…] [--seconds 180]
    python scripts/check_aims_on_gpu.py --out FOLDER --page

For each workload: the baseline (strict fp32) and the recipe that a long search found, both timed, profiled and set under the
roofline of the card. `aims.md` has the speed-up against its aim, the speed-up that the roofline would allow, what each class
of operators needs at least, and what each class of kernels took (compiled kernels join several operators, so that the two
cannot be set side by side); `aims.jsonl` has the same as data, and `NAME.pt.trace.json.gz` is the trace, for `redline profile
--trace`. Rows of earlier calls into the same folder stay. What would not end within `--seconds` is left out. `--page` runs
nothing, and writes the page from these files again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_records import RawRecords

import redline
from redline.api.workspace import Workspace

Row = dict[str, Any]
EXPECTED_S = 60.0
"""Before a workload of this call has shown what one takes."""
BUSIEST = 5
"""Kernels that are named."""


@dataclass(frozen=True)
class Aim:
    settings: dict[str, Any]
    recipe: str
    speed_up: float
    """Against strict fp32."""


AIMS = {
    "vit_b_16": Aim(
        {"model": "vit_b_16", "batch": 32},
        "fp16+channels-last+patch-products+fused-linear+compile:freeze+graphs",
        11.0,
    ),
    "resnet50-train": Aim(
        {"model": "resnet50", "batch": 32, "task": "train"},
        "amp+channels-last+overlap-gradients+pool-gradients+compile:combine+fused-optimizer+graphs+cudnn-benchmark",
        7.0,
    ),
    "cifar-train": Aim(
        {"model": "resnet18", "batch": 256, "task": "train", "image_size": 32, "classes": 10},
        "amp-bf16+channels-last+overlap-gradients+pool-gradients+compile:combine+fused-optimizer+graphs+cudnn-benchmark",
        11.0,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=AIMS, nargs="+", metavar="NAME", help=f"of {', '.join(AIMS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out what would end later than this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "aims.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows: dict[str, Row] = {row["name"]: row for row in map(json.loads, lines)}
    if given.page:
        (given.out / "aims.md").write_text(page_of(list(rows.values()), given.out))
        return
    started, longest_s = time.perf_counter(), EXPECTED_S
    file_of_history = given.out / "history.sqlite"
    with RawRecords(given.out, file_of_history), Workspace(history=file_of_history) as workspace:
        for name in given.only or AIMS:
            began = time.perf_counter()
            if began - started + longest_s > given.seconds:
                print(f"{name}: left out, as it would not end in time", flush=True)
                continue
            rows[name] = row_of(name, AIMS[name], given.device, workspace)
            keep_trace(given.out, name)
            longest_s = time.perf_counter() - began
            file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
            (given.out / "aims.md").write_text(page_of(list(rows.values()), given.out))
            print(f"{name}: {longest_s:.0f} s\n{section_of(rows[name], given.out)}", flush=True)


def row_of(name: str, aim: Aim, device: str, workspace: Workspace) -> Row:
    result = redline.roofline(**aim.settings, recipes=["baseline", aim.recipe], device=device, workspace=workspace)
    document = json.loads(result.to_json())
    return {
        "name": name,
        "aim": aim.speed_up,
        "recipe": aim.recipe,
        "device": document["ceilings"]["name"],
        "torch": document["ceilings"]["torch"],
        "rooflines": {row["recipe"]: row for row in document["results"]},
        "failures": document["failures"],
    }


def keep_trace(out: Path, name: str) -> None:
    """The one that was captured last is that of the tuned recipe."""
    captured = sorted((out / "traces").glob("*/*.json.gz"), key=lambda file: file.stat().st_mtime)
    if captured:
        shutil.copy(captured[-1], trace_of(out, name))


def trace_of(out: Path, name: str) -> Path:
    return out / f"{name}.pt.trace.json.gz"


def page_of(rows: list[Row], out: Path) -> str:
    head = [
        "| workload | aim | baseline, ms | tuned, ms | speed-up | roofline of the tuned step, ms | speed-up at the roofline | limited by |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*head, *map(line_of, rows), "", *(section_of(row, out) for row in rows)]) + "\n"


def line_of(row: Row) -> str:
    base, tuned = row["rooflines"].get("baseline"), row["rooflines"].get(row["recipe"])
    if base is None or tuned is None:
        said = "; ".join(f"{recipe}: {text}" for recipe, text in row["failures"].items())
        return f"| {row['name']} | {row['aim']:g}× | – | – | – | – | – | failed: {said} |"
    cells = [
        row["name"],
        f"{row['aim']:g}×",
        milliseconds(base["measured_s"]),
        milliseconds(tuned["measured_s"]),
        times(base["measured_s"], tuned["measured_s"]),
        milliseconds(tuned["attainable_s"]),
        times(base["measured_s"], tuned["attainable_s"]),
        tuned["limited_by"] or "–",
    ]
    return f"| {' | '.join(cells)} |"


def section_of(row: Row, out: Path) -> str:
    """The least that the card allows for the work of each class of operators, and what the tuned step's kernels took."""
    tuned = row["rooflines"].get(row["recipe"])
    lines = [f"**{row['name']}**, `{row['recipe']}`, {row['device']}, torch {row['torch']}", ""]
    if tuned is None:
        return "\n".join([*lines, "It failed.", ""])
    lines += [
        "| operators | calls | least, ms | limited by |",
        "|---|---:|---:|---|",
        *(
            f"| {each['name']} | {each['calls']} | {milliseconds(each['attainable_s'])} | {each['limited_by'] or '–'} |"
            for each in tuned["classes"]
        ),
        "",
        *kernels_of(trace_of(out, row["name"])),
        f"Bound: {tuned['bound']['label']}. {tuned['bound']['evidence']['text']}",
        "",
    ]
    return "\n".join(lines)


def kernels_of(trace: Path) -> list[str]:
    """What the profiled step spent on which kernels; nothing without a trace."""
    if not trace.exists():
        return []
    profile = redline.read_profile(trace)
    steps = profile.steps.count if profile.steps is not None else 1
    busiest = ", ".join(
        f"`{each.short_name}` {milliseconds(each.total_s / steps)} ({each.calls // steps})"
        for each in profile.kernels[:BUSIEST]
    )
    return [
        "| kernels | calls | took, ms | share of the device's time |",
        "|---|---:|---:|---:|",
        *(
            f"| {each.name} | {each.calls // steps} | {milliseconds(each.total_s / steps)} | {each.share:.0%} |"
            for each in profile.classes
        ),
        "",
        f"The device is busy for {milliseconds(profile.timeline.busy_s / steps)} ms of a profiled step and idle for "
        f"{milliseconds(profile.timeline.idle_s / steps)} ms. Its busiest kernels, ms (calls): {busiest}.",
        "",
    ]


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"


def times(seconds: float | None, over: float | None) -> str:
    return f"{seconds / over:.2f}×" if seconds and over else "–"


if __name__ == "__main__":
    main()
