"""`redline profile` against what is known of an H200, on the GPU at hand; keeps small traces as test data.

Runs the command line as a person would: fp16 + channels-last at batch 32 must be host-bound and be told to try graphs;
strict fp32 at batch 32 and fp16 at batch 256 must not. A training step must show its three phases. Then ncu must yield
a kernel table with counters (nsys too, where it is installed). Prints a verdict table; exits 1 when one is not met.

    python scripts/check_profile_on_gpu.py --out FOLDER [--model resnet50] [--skip-tools]

FOLDER/traces then holds what `tests/data/traces` wants: traces of a few steps, gzipped, each with its record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_TRACE_BYTES = 300_000
SWITCHES = 2


@dataclass(frozen=True)
class Case:
    name: str
    words: tuple[str, ...]
    host_bound: bool | None
    """None: whatever it is."""
    phases: frozenset[str] = frozenset({"forward"})


CASES = (
    Case("fp16_b32", ("--batch", "32", "-r", "fp16+channels-last"), host_bound=True),
    Case("fp32_b32", ("--batch", "32", "-r", "baseline"), host_bound=False),
    Case("fp16_b256", ("--batch", "256", "-r", "fp16"), host_bound=False),
    Case(
        "train_b32",
        ("--batch", "32", "-r", "amp+channels-last", "--task", "train"),
        host_bound=None,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
)


def profile(model: str, *words: str, out: Path) -> tuple[dict[str, Any] | None, str, float]:
    """The document, what went wrong, and how long the command took."""
    command = [sys.executable, "-m", "redline.cli.main", "profile", model, *words, "--json", "--out", str(out)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return None, f"exit {done.returncode}: {said[-1] if said else ''}", seconds
    return json.loads(done.stdout), "", seconds


def complaints(case: Case, document: dict[str, Any]) -> list[str]:
    found = []
    codes = {finding["code"]: finding for finding in document["findings"]}
    if case.host_bound is True:
        if document["bound"]["label"] != "host" or "host-bound" not in codes:
            found.append("is not told to be host-bound")
        elif "graphs" not in codes["host-bound"]["next"]:
            found.append("graphs are not recommended")
    if case.host_bound is False and (document["bound"]["label"] == "host" or "host-bound" in codes):
        found.append("is told to be host-bound")
    if set(document["phases_s"]) != case.phases:
        found.append(f"phases {sorted(document['phases_s'])}")
    if document["unclassified_share"] >= 0.05:
        found.append(f"{document['unclassified_share']:.1%} unclassified")
    if document["lost"] or not document["kernels"]:
        found.append("kernels are missing")
    return found


def keep(case: Case, model: str, document: dict[str, Any], folder: Path) -> str:
    """The trace and its record under names that tests know; the record makes the verdict repeatable anywhere."""
    from redline.record import encode
    from redline.store import History

    slug = re.sub(r"[^a-z0-9]+", "", document["capture"]["device_name"].lower().replace("nvidia", "")) or "gpu"
    stem = folder / f"{slug}_{model}_{case.name}"
    trace = Path(document["capture"]["trace"])
    size = trace.stat().st_size
    shutil.copy(trace, f"{stem}.json.gz")
    with History.open() as history:
        Path(f"{stem}.record").write_bytes(encode(history.load(document["capture"]["record_id"])))
    return f"{size / 1000:.0f} KB" + (" TOO LARGE" if size > LARGEST_TRACE_BYTES else "")


def check_case(case: Case, model: str, out: Path) -> bool:
    document, error, seconds = profile(model, *case.words, "--steps", str(SWITCHES), out=out / "raw" / case.name)
    if document is None:
        print(f"{case.name:<12} FAILED {error} ({seconds:.0f} s)", flush=True)
        return False
    (out / f"{case.name}.json").write_text(json.dumps(document, indent=1))
    wrong = complaints(case, document)
    capture, timeline = document["capture"], document["timeline"]
    busy = timeline["busy_s"] / (document["steps"]["count"] * capture["step_s"])
    codes = ",".join(f"{finding['code']}≤{finding['gain_bound']:.2f}×" for finding in document["findings"])
    print(
        f"{case.name:<12} {'ok' if not wrong else 'NOT MET':<8} bound {document['bound']['label']:<8} "
        f"step {capture['step_s'] * 1e3:6.2f} ms (profiled {capture['profiled_step_s'] * 1e3:6.2f}) busy {busy:4.0%} "
        f"idle host {document['idle']['host_wait_s'] * 1e3:.2f} launch {document['idle']['launch_gap_s'] * 1e3:.2f} "
        f"other {document['idle']['other_s'] * 1e3:.2f} ms  unclassified {document['unclassified_share']:.1%}  "
        f"trace {keep(case, model, document, out / 'traces')}  {seconds:.0f} s",
        flush=True,
    )
    print(f"{'':<12} {document['bound']['evidence']['text']}")
    print(f"{'':<12} findings: {codes or 'none'}")
    for line in wrong:
        print(f"{'':<12} NOT MET: {line}")
    return not wrong


def check_tool(tool: str, model: str, out: Path) -> bool:
    words = ("--batch", "32", "-r", "fp16+channels-last", "--tool", tool)
    document, error, seconds = profile(model, *words, out=out / "raw" / tool)
    if document is None:
        print(f"{tool:<12} FAILED {error} ({seconds:.0f} s)", flush=True)
        return False
    (out / f"{tool}.json").write_text(json.dumps(document, indent=1))
    overall = ", ".join(
        f"{one['name']} {one['value']:.3g} {one['unit']} ({one['verdict']})"
        for one in document["counters"]
        if one["kernel"] is None
    )
    calls = sum(row["calls"] for row in document["kernels"])
    print(f"{tool:<12} {len(document['kernels'])} kernels, {calls} calls; {overall or 'no counters'}  {seconds:.0f} s")
    return bool(document["kernels"]) and (tool != "ncu" or bool(document["counters"]))


def is_there(tool: str) -> bool:
    from redline.errors import UsageError
    from redline.search.profile import find_tool
    from redline.trace.vendors.tool import TOOLS

    try:
        find_tool(TOOLS.get(tool)())
    except UsageError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--skip-tools", action="store_true")
    given = parser.parse_args()
    out = given.out.absolute()
    (out / "traces").mkdir(parents=True, exist_ok=True)
    os.environ["REDLINE_STORE"] = str(out / "history.sqlite")
    met = [check_case(case, given.model, out) for case in CASES]
    if not given.skip_tools:
        met.append(check_tool("ncu", given.model, out))
        if is_there("nsys"):
            met.append(check_tool("nsys", given.model, out))
        else:
            print("nsys         not installed: skipped")
    shutil.rmtree(out / "raw", ignore_errors=True)
    print(f"{sum(met)} of {len(met)} as expected")
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
