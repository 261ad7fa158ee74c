"""`redline gate` before a fake bench, and once before real processes of two commits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import yaml
from invoking import Redline, document, refused
from typer.testing import Result

from redline.model.protocol import Checked
from redline.model.record import Failure, WorkloadInfo
from redline.model.spec import RunSpec
from redline.store import History
from redline.testing import bench
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

EXAMPLES = Path(__file__).parents[2] / "examples"

BENCH = """
device = "cuda:0"
[[run]]
name = "fast"
model = "m"
batch = 8
[[run]]
name = "other"
model = "n"
threshold = 0.1
"""


class World:
    """The truth of both sides, which a test may change."""

    def __init__(self) -> None:
        self.slowdown = {"m": 1.0, "n": 1.0}
        self.broken: set[str] = set()

    def step_s(self, spec: RunSpec) -> float:
        return 0.01 if spec.launch.folder else 0.01 * self.slowdown[spec.workload.model]

    def failure(self, spec: RunSpec) -> Failure | None:
        side = "baseline" if spec.launch.folder else "candidate"
        return Failure(stage="build", kind="crash", message="gone") if side in self.broken else None


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def door(world: World) -> FakeDoor:
    return FakeDoor(Landscape(step_s=world.step_s, failure=world.failure, offset_sigma=0.002))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "bench.toml").write_text(BENCH)
    monkeypatch.chdir(folder)
    commit(folder, "one")
    return folder


def commit(folder: Path, subject: str) -> None:
    git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
    if not (folder / ".git").exists():
        subprocess.run([*git, "init", "-q", "-b", "main"], cwd=folder, check=True)
    subprocess.run([*git, "add", "."], cwd=folder, check=True)
    subprocess.run([*git, "commit", "-qm", subject], cwd=folder, check=True)


def rows_of(result: Result) -> list[dict[str, Any]]:
    """The row of each benchmark, with plain numbers, and the document's other tables beside them."""
    found: list[dict[str, Any]] = document(result)["tables"]["benchmarks"]
    return found


@pytest.mark.parametrize(
    ("slowdown", "broken", "words", "code", "verdicts"),
    [
        (1.0, "", "", 0, ["same", "same"]),
        (1.03, "", "", 0, ["same", "same"]),  # below a threshold of its own
        (1.03, "", "--threshold 0.03", 1, ["same", "slower"]),
        (1.0, "", "--benchmark other", 0, ["same"]),
        (1.0, "candidate", "", 1, ["failed", "failed"]),
        (1.0, "baseline", "", 3, ["incomparable", "incomparable"]),
        (1.0, "baseline", "--undecided ok", 0, ["incomparable", "incomparable"]),
    ],
)
def test_the_exit_code_and_the_verdicts_say_what_happened(
    redline: Redline,
    project: Path,
    world: World,
    slowdown: float,
    broken: str,
    words: str,
    code: int,
    verdicts: list[str],
) -> None:
    world.slowdown["n"], world.broken = slowdown, {broken}
    result = redline(f"gate bench.toml --baseline main --json {words}")
    rows = rows_of(result)
    assert (result.exit_code, [row["verdict"] for row in rows]) == (code, verdicts)
    assert document(result)["about"]["failed"] is (code == 1)
    if broken == "baseline":
        assert [reason["code"] for reason in rows[0]["notes"]] == ["not-runnable", "no-baseline"]
    elif not broken:
        assert all(row["change"]["low"] <= row["change"]["value"] <= row["change"]["high"] for row in rows)
        assert {row["basis"] for row in rows} == {"interleaved"}
    trees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(trees.splitlines()) == 1, "what was checked out is gone again"


def test_something_slower_is_1_and_told_everywhere(redline: Redline, project: Path, world: World) -> None:
    world.slowdown["m"] = 1.06
    result = redline("gate bench.toml --baseline main --summary s.md --junit j.xml --json")
    (row, _) = rows_of(result)
    assert (result.exit_code, document(result)["about"]["failed"], row["verdict"]) == (1, True, "slower")
    assert row["change"]["value"] == pytest.approx(0.06, abs=0.01)
    assert row["now"]["value"] / row["baseline"]["value"] - 1 == pytest.approx(row["change"]["value"])
    assert "slower" in (project / "s.md").read_text()
    suite = ElementTree.parse(project / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    assert [case.find("failure") is not None for case in suite.iter("testcase")] == [True, False]


@pytest.mark.parametrize(
    ("unknown", "code", "verdict"),
    [({"candidate"}, 1, "failed"), ({"baseline"}, 3, "incomparable"), ({"candidate", "baseline"}, 2, "")],
)
def test_a_benchmark_that_one_side_does_not_have(
    redline: Redline, project: Path, monkeypatch: pytest.MonkeyPatch, unknown: set[str], code: int, verdict: str
) -> None:
    check = bench._check

    def answer(spec: RunSpec, truth: Landscape) -> Checked:
        found, side = check(spec, truth), "baseline" if spec.launch.folder else "candidate"
        is_lost = spec.workload.model == "m" and side in unknown
        return msgspec.structs.replace(found, usage="model.py has no function 'm'") if is_lost else found

    monkeypatch.setattr(bench, "_check", answer)
    result = redline("gate bench.toml --baseline main --json")
    assert result.exit_code == code
    if code == 2:  # what neither side has is a mistake in what was asked
        refused(result, "no function")
        return
    rows = rows_of(result)
    assert [row["verdict"] for row in rows] == [verdict, "same"]
    assert "no function" in str(rows[0]["notes"])


def test_a_clone_of_ci_finds_the_branches_of_its_origin(
    redline: Redline, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shallow, stands on no branch, and has none of its own."""
    clone = tmp_path / "clone"
    for words in (
        ["git", "clone", "-q", "--depth=1", f"file://{project}", str(clone)],
        ["git", "-C", str(clone), "checkout", "-q", "--detach"],
        ["git", "-C", str(clone), "branch", "-q", "-D", "main"],
    ):
        subprocess.run(words, check=True)
    monkeypatch.chdir(clone)
    assert redline("gate bench.toml --baseline main").exit_code == 0
    result = redline("gate bench.toml --baseline v1")
    assert result.exit_code == 2
    assert "'git fetch --depth=1 origin v1'" in result.stderr


def test_stored_records_are_a_baseline(redline: Redline, project: Path, world: World) -> None:
    for model in ("m", "n"):
        batch = ["--batch", "8"] if model == "m" else []
        words = ["run", model, *batch, "--device", "cuda:0", "--effort", "quick", "--replicates", "6"]
        assert redline(*words).exit_code == 0
    assert redline("history export --format json --raw -o records.json").exit_code == 0
    world.slowdown["m"] = 1.08
    found = {}
    for baseline in ("history", "records.json"):  # what the first measures is in the history of the second
        result = redline("gate bench.toml --baseline", baseline, "--json")
        rows = rows_of(result)
        found[baseline] = [(row["verdict"], row["basis"], row["processes"].split(" / ")[0]) for row in rows]
        assert result.exit_code == 1
    assert found["records.json"] == [("slower", "stored", "6"), ("same", "stored", "6")]
    assert found["history"][0][1] == "stored"


def test_records_of_other_settings_are_incomparable(redline: Redline, project: Path) -> None:
    redline("run m --batch 16 --device cuda:0 --effort quick --replicates 3")
    result = redline("gate bench.toml --baseline history --json")
    assert result.exit_code == 3
    (reason, *_) = rows_of(result)[0]["notes"]
    assert (reason["code"], reason["about"]) == ("differs", "batch")


def test_inputs_of_another_size_are_no_speed_up(
    redline: Redline, project: Path, monkeypatch: pytest.MonkeyPatch, door: FakeDoor
) -> None:
    """A factory that makes half the batch takes half the time for a step, and is no faster."""
    whole = bench.workload_of

    def halved(spec: RunSpec, truth: Landscape) -> WorkloadInfo:
        batch = 64 if spec.launch.folder else 32
        return msgspec.structs.replace(whole(spec, truth), input_shapes=(f"{batch}×256 float32",))

    monkeypatch.setattr(bench, "workload_of", halved)
    door.landscape = replace(door.landscape, step_s=lambda spec: 0.02 if spec.launch.folder else 0.01)
    result = redline("gate bench.toml --baseline main --fail-on numerics --json")
    (row, _) = rows_of(result)
    assert (result.exit_code, row["verdict"], "change" in row) == (3, "incomparable", False)
    assert row["processes"] == "1 / 1", "no time is spent on what cannot be compared"
    assert "64×256 float32, now of 32×256 float32" in row["notes"][0]["text"]


def test_a_tag_names_a_baseline(redline: Redline, project: Path) -> None:
    redline("run m --batch 8 --device cuda:0 --effort quick --replicates 5")
    with History.open() as history:
        for row in history.rows():
            history.mark(row.id, "tag", "release", at=1.0)
    result = redline("gate bench.toml --baseline tag:release --json")
    assert rows_of(result)[0]["verdict"] == "same"
    assert redline("gate bench.toml --baseline tag:nobody").exit_code == 2


def test_another_recipe_is_a_baseline(redline: Redline, project: Path, door: FakeDoor) -> None:
    door.landscape = replace(door.landscape, step_s={"fp16": 0.01, "*": 0.02})
    result = redline("gate bench.toml --baseline recipe:fp16 --json")
    assert {row["verdict"] for row in rows_of(result)} == {"slower"}


def test_every_format_tells_what_the_exit_code_does(redline: Redline, project: Path, door: FakeDoor) -> None:
    """Undecided in time, with a check that failed: one failure, and no error besides."""
    door.landscape = replace(
        door.landscape, offset_sigma=0.3, memory_bytes=lambda spec: 2**28 if spec.launch.folder else 2**29
    )
    words = ["--budget", "1", "--fail-on", "memory", "--junit", "j.xml", "--summary", "s.md", "--json"]
    result = redline("gate bench.toml --baseline main", *words)
    rows = rows_of(result)
    assert [row["verdict"] for row in rows] == ["inconclusive", "inconclusive"]
    assert (result.exit_code, document(result)["about"]["failed"]) == (1, True)
    suite = ElementTree.parse(project / "j.xml").getroot()
    assert {kind: suite.get(f"{kind}s") for kind in ("failure", "error")} == {"failure": "2", "error": "0"}
    assert [len(list(suite.iter(kind))) for kind in ("failure", "error", "skipped")] == [2, 0, 0]
    assert "**failed: 2 inconclusive; failed checks: fast: memory, other: memory" in (project / "s.md").read_text()


@pytest.mark.parametrize("name", ["memory", "numerics"])
def test_checks_fail_only_when_asked_for(redline: Redline, project: Path, door: FakeDoor, name: str) -> None:
    grown = {"memory_bytes": lambda spec: 2**28 if spec.launch.folder else 2**29}
    wrong = {"numerics": lambda spec: replace_numerics(passed=bool(spec.launch.folder))}
    door.landscape = replace(door.landscape, **(grown if name == "memory" else wrong))
    assert redline("gate bench.toml --baseline main").exit_code == 0
    result = redline("gate bench.toml --baseline main --fail-on", name, "--json")
    assert result.exit_code == 1
    check = document(result)["tables"]["checks"][0]
    assert (check["benchmark"], check["check"], check["failed"]) == ("fast", name, True)


def replace_numerics(*, passed: bool) -> object:
    from redline.model.record import Numerics

    return Numerics(rel_l2=1e-4 if passed else 0.5, cosine=1.0, passed=passed)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--baseline no-such-ref", "'no-such-ref' is neither a file nor a git ref"),
        ("--baseline main --threshold 0", "threshold must be above 0"),
        ("--baseline main --fail-on speed", "fail-on"),
        ("--baseline main --undecided maybe", "must be one of fail, ok"),
        ("--baseline main --benchmark x", "no benchmark 'x': the file has fast, other"),
        ("--baseline main --budget 0", "budget must be above 0"),
        ("--baseline main --junit .", "cannot write to .: it is a folder"),
        ("--baseline=-x", "is not a git ref"),
    ],
)
def test_a_mistake_is_one_line_and_2(redline: Redline, project: Path, words: str, says: str) -> None:
    refused(redline(f"gate bench.toml {words}"), says)


def test_what_json_printed_is_no_baseline_and_the_answer_names_save(redline: Redline, project: Path) -> None:
    (project / "base.json").write_text(redline("run m --batch 8 --device cuda:0 --effort quick --json").stdout)
    refused(redline("gate bench.toml --baseline base.json"), "--save")


MODEL = """
import torch

def make(batch=16):
    work = [torch.nn.Linear(256, 256) for _ in range({layers})]
    return torch.nn.Sequential(*work).eval(), (torch.randn(batch, 256),)
"""


BRIEF = (
    "block_seconds = 0.03, min_rounds = 3, cpu_target_half_width = 0.5, check_numerics = false, "
    "warmup_min_seconds = 0.05, warmup_window_seconds = 0.02"
)
"""Three times the layers show in short blocks."""


@pytest.mark.slow
@pytest.mark.long
def test_the_example_for_github_actions_runs_as_it_is(
    tmp_path: Path, own_history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `run:` lines in a clone, against real processes of two commits: three times the layers, whatever the load."""
    example = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
    lines = [step["run"] for step in example["jobs"]["gate"]["steps"] if "run" in step]
    assert len(lines) == 2
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    (origin / "model.py").write_text(MODEL.format(layers=8))
    settings = f'device = "cpu"\nthreads = 1\nmeasure = {{ {BRIEF} }}\n'
    (origin / "bench.toml").write_text(f'{settings}[[run]]\nmodel = "model.py:make"\nbatch = 16\n')
    commit(origin, "one")
    subprocess.run(["git", "clone", "-q", str(origin), str(clone)], check=True)
    (clone / "model.py").write_text(MODEL.format(layers=24))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"python": "", "redline": "-m redline"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tools / name).chmod(0o755)
    summary = tmp_path / "summary.md"
    variables = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "GITHUB_BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    done = [
        subprocess.run(["bash", "-e", "-c", line], cwd=clone, env=variables, capture_output=True, text=True)
        for line in lines
    ]
    assert [each.returncode for each in done] == [0, 1], done[-1].stderr + done[0].stderr
    assert "slower" in summary.read_text()
    assert ElementTree.parse(clone / "gate.xml").getroot().get("failures") == "1"
    with History.open() as history:
        records = {each.id: each.prepared.environment.git_dirty for each in history.find() if each.prepared}
        dirty = set(records.values())
        points = [point for (seen,) in [history.series()] for point in history.points(seen.key)]
    assert dirty == {True, False}, "one side is the clean commit, the other this working tree"
    order = [records[point.record_id] for point in points]
    assert order == sorted(order), "in the trend all of the commit come first, in the order in which the code was made"
