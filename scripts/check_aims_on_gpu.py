"""Where the tuned recipes stand against their aims, and how much more the GPU at hand would allow, in about two minutes.

    python scripts/check_aims_on_gpu.py --out FOLDER [--only NAME…] [--seconds 180]

For each workload: the baseline (strict fp32) and the recipe that a long search found, both timed, profiled and set under the
roofline of the card. `aims.md` has the speed-up against its aim, the speed-up that the roofline would allow, and for each
class of kernels what it took and the least that it could take; `aims.jsonl` has the same as data. Rows of earlier calls into
the same folder stay. What would not end within `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import json
import math
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


@dataclass(frozen=True)
class Aim:
    settings: dict[str, Any]
    recipe: str
    speed_up: float
    """Against strict fp32."""


AIMS = {
    "vit_b_16": Aim(
        {"model": "vit_b_16", "batch": 32},
        "fp16+channels-last+compile:freeze+graphs+sdpa:cudnn+cudnn-benchmark",
        11.0,
    ),
    "resnet50-train": Aim(
        {"model": "resnet50", "batch": 32, "task": "train"},
        "amp+channels-last+compile+fused-optimizer+graphs+cudnn-benchmark",
        7.0,
    ),
    "cifar-train": Aim(
        {"model": "resnet18", "batch": 256, "task": "train", "image_size": 32, "classes": 10},
        "amp-bf16+channels-last+compile+fused-optimizer+graphs+cudnn-benchmark",
        11.0,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=AIMS, nargs="+", metavar="NAME", help=f"of {', '.join(AIMS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out what would end later than this")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "aims.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows: dict[str, Row] = {row["name"]: row for row in map(json.loads, lines)}
    started, longest_s = time.perf_counter(), EXPECTED_S
    file_of_history = given.out / "history.sqlite"
    with RawRecords(given.out, file_of_history), Workspace(history=file_of_history) as workspace:
        for name in given.only or AIMS:
            began = time.perf_counter()
            if began - started + longest_s > given.seconds:
                print(f"{name}: left out, as it would not end in time", flush=True)
                continue
            rows[name] = row_of(name, AIMS[name], given.device, workspace)
            longest_s = time.perf_counter() - began
            file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
            (given.out / "aims.md").write_text(page_of(list(rows.values())))
            print(f"{name}: {longest_s:.0f} s\n{section_of(rows[name])}", flush=True)


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


def page_of(rows: list[Row]) -> str:
    head = [
        "| workload | aim | baseline, ms | tuned, ms | speed-up | roofline of the tuned step, ms | speed-up at the roofline | limited by |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*head, *map(line_of, rows), "", *map(section_of, rows)]) + "\n"


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


def section_of(row: Row) -> str:
    """Class by class: what the tuned step took, and the least that the card allows for the same work."""
    tuned = row["rooflines"].get(row["recipe"])
    lines = [f"**{row['name']}**, `{row['recipe']}`, {row['device']}, torch {row['torch']}", ""]
    if tuned is None:
        return "\n".join([*lines, "It failed.", ""])
    lines += [
        "| kernels | calls | took, ms | least, ms | times the least | limited by |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for each in tuned["classes"]:
        cells = [
            each["name"],
            str(each["calls"]),
            milliseconds(each["measured_s"]),
            milliseconds(each["attainable_s"]),
            times(each["measured_s"], each["attainable_s"]),
            each["limited_by"] or "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Bound: {tuned['bound']['label']}. {tuned['bound']['evidence']['text']}", ""]
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"


def times(seconds: float | None, over: float | None) -> str:
    return f"{seconds / over:.2f}×" if seconds and over else "–"


if __name__ == "__main__":
    main()
