"""`redline profile` against what is known of an H200, on the GPU at hand; keeps small traces as test data.

Runs the command line as a person would: fp16 + channels-last at batch 32 must be host-bound and be told to try graphs;
strict fp32 at batch 32 and fp16 at batch 256 must not. A training step must show its three phases. Then ncu must yield
a kernel table with counters (nsys too, where it is installed). Prints a verdict table; exits 1 when one is not met.

    python scripts/check_profile_on_gpu.py --out FOLDER [--model resnet50] [--skip-tools]

FOLDER/traces then holds what `tests/data/traces` wants: traces of a few steps, gzipped, each with its record.

    python scripts/check_profile_on_gpu.py --out FOLDER --only recipes [--recipes compile compile+graphs] [--seconds 140]

Profiles six recipes of two models, one in inference and one in training. Operators and graph launches must cover 97 % of
the device's time, and following the advice of the first finding must bring no more than its bound. Each row is written
to FOLDER/recipes.md and recipes.jsonl as soon as it is known; what does not fit into the time is named and left out. The
second file also keeps what was seen before and after following the advice: times of host and device, flags, kernels.
The eager recipes and graphs take about 65 s on an H200, `--recipes compile compile+graphs` about 110 s.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from raw_records import RawRecords

import redline
from redline.model.errors import RedlineError

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
    from redline.model.migrations import encode
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


LEAST_COVERED = 0.97
NOISE = 0.03
"""Two medians of a few blocks differ by so much without any reason."""
WORKLOADS: tuple[dict[str, Any], ...] = (
    {"model": "resnet18", "task": "infer", "batch": 32},
    {"model": "transformer", "task": "train", "batch": 16},
)
RECIPES = ("baseline", "fp16", "amp", "graphs", "compile", "compile+graphs")
EXPECTED_S = {"eager": 6.0, "compile": 18.0}
"""For one profile; decides what is not begun any more."""


@dataclass(frozen=True)
class Seen:
    """What tells why a step takes as long as it does."""

    step_ms: float
    """Median without the profiler, as all times but the next ones."""
    step_range_ms: tuple[float, float]
    """Medians of the shortest and the longest block: far apart where the host is disturbed."""
    issue_share: float | None
    least_issue_ms: float | None
    profiled_step_ms: float | None
    busy_ms: float
    """Of a step under the profiler, that the device was busy."""
    host_ms: float
    """Of a step under the profiler, that the host was busy and not waiting."""
    kernels: dict[str, float]
    """The three that take longest, with the ms of a step."""
    findings: dict[str, float]
    """Each with its bound."""
    flags: dict[str, str]

    @classmethod
    def of(cls, result: redline.ProfileResult) -> Seen:
        profile, record = result.profile, result.record
        assert profile.capture is not None
        assert record is not None
        assert record.prepared is not None
        capture, steps = profile.capture, profile.steps_seen or 1
        blocks = [median(block.samples) * 1e3 for block in record.blocks if block.samples]
        return cls(
            step_ms=(capture.step_s or 0.0) * 1e3,
            step_range_ms=(min(blocks), max(blocks)),
            issue_share=capture.issue_share,
            least_issue_ms=capture.least_issue_s * 1e3 if capture.least_issue_s is not None else None,
            profiled_step_ms=capture.profiled_step_s * 1e3 if capture.profiled_step_s else None,
            busy_ms=profile.timeline.busy_s / steps * 1e3,
            host_ms=profile.host.busy_s / steps * 1e3,
            kernels={row.name: row.total_s / steps * 1e3 for row in profile.kernels[:3]},
            findings={each.code: each.gain_bound for each in profile.findings},
            flags={name: value for name, value in record.prepared.environment.flags.items() if "tf32" in name},
        )


@dataclass(frozen=True)
class Followed:
    model: str
    task: str
    recipe: str
    step_ms: float | None = None
    covered: float | None = None
    """Share of the device's time in operators and graph launches."""
    finding: str = ""
    next: str = ""
    bound: float | None = None
    tried: str = ""
    """The recipe of the first finding that names one."""
    gain: float | None = None
    within: bool | None = None
    problem: str = ""
    before: Seen | None = None
    after: Seen | None = None
    """With the recipe that was tried."""

    @property
    def is_met(self) -> bool:
        return not self.problem and self.within is not False and (self.covered is None or self.covered >= LEAST_COVERED)

    def line(self) -> str:
        cells = (
            self.model, self.task, self.recipe, _cell(self.step_ms, ".3f"), _cell(self.covered, ".1%"),
            self.finding or "none", _cell(self.bound, ".2f", "×"), self.tried or "–", _cell(self.gain, ".2f", "×"),
            self.problem or {True: "yes", False: "NO", None: "–"}[self.within],
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEAD = """| model | task | recipe | step, ms | covered | first finding | bound | tried | gain | within |
|---|---|---|---|---|---|---|---|---|---|
"""


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


class Profiler:
    """Profiles each recipe of a workload once: what one finding advises is often another row of the table."""

    def __init__(self, device: str, seconds: float, workspace: redline.Workspace) -> None:
        self._device = device
        self._ends = time.monotonic() + seconds
        self._workspace = workspace
        self._known: dict[str, redline.ProfileResult | str] = {}

    def of(self, workload: dict[str, Any], recipe: str) -> redline.ProfileResult | str:
        """The profile, or why there is none."""
        key = f"{workload} {recipe}"
        if key not in self._known:
            left = self._ends - time.monotonic()
            if left < EXPECTED_S["compile" if "compile" in recipe else "eager"]:
                return f"not begun: {left:.0f} s left"
            self._known[key] = self._profiled(workload, recipe)
        return self._known[key]

    def _profiled(self, workload: dict[str, Any], recipe: str) -> redline.ProfileResult | str:
        try:
            return redline.profile(
                **workload, recipe=recipe, device=self._device, effort="quick", workspace=self._workspace
            )
        except RedlineError as error:
            return str(error).splitlines()[0]


def followed(profiler: Profiler, workload: dict[str, Any], recipe: str) -> Followed:
    names = {"model": workload["model"], "task": workload["task"], "recipe": recipe}
    result = profiler.of(workload, recipe)
    if isinstance(result, str):
        return Followed(**names, problem=result)
    found, before = result.profile, Seen.of(result)
    rows = [row for row in found.operators if row.source in ("operator", "graph")]
    covered = sum(row.device_share for row in rows) if found.has_device else None
    names |= {"step_ms": before.step_ms, "covered": covered, "before": before}
    if not found.findings:
        return Followed(**names)
    first = next((one for one in found.findings if one.recipe is not None), found.findings[0])
    shown = first.code if first is found.findings[0] else f"{found.findings[0].code}, then {first.code}"
    names |= {"finding": shown, "next": first.next, "bound": first.gain_bound}
    if first.recipe is None:
        return Followed(**names)
    names["tried"] = first.recipe
    result = profiler.of(workload, first.recipe)
    if isinstance(result, str):
        return Followed(**names, problem=result)
    after = Seen.of(result)
    gain = before.step_ms / after.step_ms
    kept = first.code in after.findings and next(iter(after.kernels), "") == next(iter(before.kernels), "")
    return Followed(
        **names,
        gain=gain,
        within=gain <= first.gain_bound * (1 + NOISE),
        after=after,
        problem="no effect: the same kernel takes longest" if kept and gain < 1 + NOISE else "",
    )


def recipe_rows(profiler: Profiler, recipes: Sequence[str]) -> Iterator[Followed]:
    for recipe in recipes:
        for workload in WORKLOADS:
            yield followed(profiler, workload, recipe)


def check_recipes(device: str, recipes: Sequence[str], seconds: float, out: Path) -> bool:
    met = []
    with (
        RawRecords(out) as raw,
        redline.Workspace(journal=raw.journal) as workspace,
        (out / "recipes.md").open("w") as table,
        (out / "recipes.jsonl").open("w") as lines,
    ):
        table.write(HEAD)
        print(HEAD, end="")
        for row in recipe_rows(Profiler(device, seconds, workspace), recipes):
            met.append(row.is_met)
            print(row.line(), flush=True)
            table.write(row.line() + "\n")
            lines.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
            table.flush()
            lines.flush()
    print(f"{sum(met)} of {len(met)} as expected")
    return all(met)


def is_there(tool: str) -> bool:
    from redline.model.errors import UsageError
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
    parser.add_argument("--only", choices=("recipes",), help="what to check; default: the cases above and the tools")
    parser.add_argument("--device", default="cuda", help="of the recipes")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="those to check, in this order; default: all six")
    parser.add_argument("--seconds", type=float, default=140.0, help="for the recipes; no new one begins after that")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if given.only == "recipes":
        sys.exit(0 if check_recipes(given.device, given.recipes, given.seconds, out) else 1)
    (out / "traces").mkdir(exist_ok=True)
    os.environ["REDLINE_STORE"] = str(out / "history.sqlite")
    with RawRecords(out, out / "history.sqlite"):
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
