"""Ceilings and roofline of the GPU at hand against what is known of it, in one command of about a minute.

Measures the ceilings afresh and sets them against the expected values; then the roofline of ResNet-50 at batch 32 under
the baseline and under the best recipe known by hand, and the latency of its modules. The numbers must add up: no step
may beat its roofline, and the modules' kernels must make up most of an eager step. Exits 1 when something is not met.

    python scripts/check_roofline_on_gpu.py --out FOLDER --bf16 791 --tf32 408 --fp32 51 --copy 4.3

Expected values in TFLOP/s and TB/s; one that is not given is only printed. FOLDER gets the report, the documents, the
plot and the records.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from raw_records import RawRecords

TOLERANCE = 0.05
RECIPES = ("baseline", "fp16+channels-last+compile:reduce-overhead")


class Report:
    """Everything printed is kept; what is not met is counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self.not_met: list[str] = []

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self._lines.append(line)
        self._path.write_text("\n".join(self._lines) + "\n")

    def check(self, met: bool, what: str) -> None:
        self.say(f"  {'ok     ' if met else 'NOT MET'} {what}")
        if not met:
            self.not_met.append(what)


def redline(*words: str, document: Path) -> tuple[dict[str, Any] | None, str]:
    """The command's document, or what it said instead; and its time."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "redline.cli.main", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = f"{time.perf_counter() - started:.0f} s"
    if done.returncode != 0:
        return None, f"exit {done.returncode} after {took}: {done.stderr.strip()[-600:]}"
    document.write_text(done.stdout)
    return json.loads(done.stdout), took


def check_ceilings(report: Report, out: Path, device: str, expected: dict[str, float | None]) -> None:
    found, told = redline("ceilings", "--fresh", "--device", device, document=out / "ceilings.json")
    if found is None:
        report.check(False, f"ceilings: {told}")
        return
    report.say(f"ceilings of {found['name']} (torch {found['torch']}), {told}")
    figures = {form: (figure, "TFLOP/s", 1.0) for form, figure in found["tflops"].items()}
    figures["copy"] = (found["copy_bytes_per_s"], "TB/s", 1e12)
    for name, (figure, unit, factor) in figures.items():
        measured = figure["measured"]
        sheet = "" if figure["datasheet"] is None else f", datasheet {figure['datasheet'] / factor:.4g}"
        wanted = expected.get(name)
        if measured is None:
            report.say(f"          {name:<5} not measured{sheet}")
        elif wanted is None:
            report.say(f"          {name:<5} {measured / factor:8.4g} {unit}{sheet}")
        else:
            off = measured / factor / wanted - 1
            line = f"{name:<5} {measured / factor:8.4g} {unit}, expected {wanted:g} ({off:+.1%}){sheet}"
            report.check(abs(off) <= TOLERANCE, line)
    report.say(f"          launch {found['launch_s']['measured'] * 1e6:.2f} µs, cache {found['cache_bytes']} bytes")
    report.say(
        f"          shapes {found['shapes']}; {'; '.join(each['text'] for each in found['notes']) or 'no notes'}"
    )


def check_roofline(report: Report, out: Path, device: str, model: str, batch: int) -> None:
    recipes = [word for recipe in RECIPES for word in ("-r", recipe)]
    words = ("roofline", model, "-b", str(batch), *recipes, "--device", device, "-o", str(out / "roofline.png"))
    found, told = redline(*words, document=out / "roofline.json")
    if found is None:
        report.check(False, f"roofline: {told}")
        return
    report.say(f"roofline of {model}, batch {batch}, {told}")
    cache = found["ceilings"]["cache_bytes"]
    for row in found["results"]:
        report.say(
            f"  {row['recipe']}: {row['flops'] / 1e9:.1f} GFLOP, {row['compulsory_bytes'] / 1e6:.0f} MB compulsory "
            f"(cache {0 if cache is None else cache / 1e6:.0f}), {row['operator_bytes'] / 1e6:.0f} MB unfused, "
            f"{row['intensity']:.0f} FLOP/byte"
        )
        report.say(
            f"    roofline {row['attainable_s'] * 1e3:.3f} ms ({row['limited_by']}; compute {row['compute_s'] * 1e3:.3f}, "
            f"memory {row['memory_s'] * 1e3:.3f}), unfused {row['unfused_s'] * 1e3:.3f}, "
            f"measured {row['measured_s'] * 1e3:.3f} ms = {batch / row['measured_s']:.0f}/s"
        )
        mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
        report.say(
            f"    headroom {row['headroom']:.2f}×, of the ceiling {row['efficiency']:.1%}, MFU {mfu}, "
            f"bound {row['bound']['label']}: {row['bound']['evidence']['text']}"
        )
        for one in row["classes"]:
            took = "n/a" if one["measured_s"] is None else f"{one['measured_s'] * 1e3:.3f} ms"
            report.say(
                f"      {one['name']:<12} {one['calls']:>4} calls  attainable {one['attainable_s'] * 1e3:.3f} ms  "
                f"measured {took}  {one['limited_by']}"
            )
        report.check(row["attainable_s"] <= row["measured_s"] and row["error"] is None, "roofline time ≤ measured time")
        report.check(row["unfused_s"] >= row["attainable_s"], "unfused time ≥ roofline time")
        for each in row["notes"]:
            report.say(f"    note: {each['text']}")
    keep(out, [row["record_id"] for row in found["results"]])


def check_modules(report: Report, out: Path, device: str, model: str, batch: int) -> None:
    words = ("flops", model, "-b", str(batch), "--latency", "--device", device)
    found, told = redline(*words, document=out / "modules.json")
    if found is None:
        report.check(False, f"flops --latency: {told}")
        return
    report.say(f"modules of {model}, batch {batch}, {told}")
    for row in found["modules"]:
        if row["depth"] <= 1 and row["latency_s"]:
            report.say(
                f"      {row['path'] or row['type']:<10} {row['latency_s'] * 1e3:8.3f} ms {row['share']:6.1%}  "
                f"{(row['achieved_flops_per_s'] or 0) / 1e12:6.2f} TFLOP/s  {row['bound']}"
            )
    roofline = out / "roofline.json"
    step_s = json.loads(roofline.read_text())["results"][0]["measured_s"] if roofline.exists() else None
    if step_s is not None and found["latency_s"] is not None:
        share = found["latency_s"] / step_s
        report.check(0.7 < share < 1.1, f"kernels of all modules make up {share:.0%} of an eager step")
    else:
        report.check(False, "modules have no latency")


def keep(out: Path, ids: list[str]) -> None:
    """The records, so that the verdicts can be made again anywhere; without the machine's name."""
    import msgspec

    from redline.model.migrations import encode
    from redline.store import History

    with History.open() as history:
        for number, record_id in enumerate(ids):
            record = history.load(record_id)
            if record.prepared is not None:
                place = msgspec.structs.replace(record.prepared.environment, hostname="")
                prepared = msgspec.structs.replace(record.prepared, environment=place)
                record = msgspec.structs.replace(record, prepared=prepared)
            (out / f"roofline_{number}.record").write_bytes(encode(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=32)
    for name in ("bf16", "fp16", "tf32", "fp32", "fp8", "copy"):
        parser.add_argument(f"--{name}", type=float)
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["REDLINE_STORE"] = str(out / "history.sqlite")
    report = Report(out / "report.txt")
    started = time.perf_counter()
    expected = {name: getattr(given, name) for name in ("bf16", "fp16", "tf32", "fp32", "fp8", "copy")}
    with RawRecords(out, out / "history.sqlite"):
        check_ceilings(report, out, given.device, expected)
        check_roofline(report, out, given.device, given.model, given.batch)
        check_modules(report, out, given.device, given.model, given.batch)
    report.say(f"{len(report.not_met)} not met, {time.perf_counter() - started:.0f} s")
    sys.exit(1 if report.not_met else 0)


if __name__ == "__main__":
    main()
