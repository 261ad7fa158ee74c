"""Capturing through a door, and a worker behind a profiler that is not there but for its manners."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from redline.model.errors import DoorError, UsageError
from redline.model.protocol import Profile
from redline.model.record import Block, Failure, RunRecord
from redline.model.spec import RunSpec, WorkloadSpec
from redline.search.observer import NoJournal
from redline.search.vendors import TOOLS, check_device, find_tool, profile_behind
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.capture import TIMED_BLOCKS, as_profiled, capture

MISBEHAVING = Path(__file__).parents[1] / "models" / "misbehaving.py"
SPEC = RunSpec(workload=WorkloadSpec(model=f"{MISBEHAVING}:sound"), device="cpu")


class Kept(NoJournal):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.record: RunRecord | None = None

    def begin(self, record: RunRecord) -> None:
        self.calls.append("begin")

    def append(self, record_id: str, block: Block) -> None:
        self.calls.append("append")

    def finish(self, record: RunRecord) -> None:
        self.calls.append("finish")
        self.record = record


class TestCapture:
    def test_blocks_are_timed_before_the_profiler_starts_and_a_failure_is_kept(self) -> None:
        door, journal = FakeDoor(Landscape(step_s=0.01)), Kept()
        spec = as_profiled(RunSpec(workload=WorkloadSpec(model="resnet50"), device="cuda:0"))
        record = capture(spec, Profile(path="/nowhere"), door, journal)
        assert journal.calls == ["begin", *["append"] * TIMED_BLOCKS, "finish"]
        assert journal.record == record
        assert (record.failure.stage, record.stopped) == ("profile", "failed")
        assert len(record.blocks) == TIMED_BLOCKS
        assert record.closed is not None

    def test_a_worker_that_cannot_be_prepared_is_told(self) -> None:
        failure = Failure(stage="build", kind="oom", message="too large")
        door = FakeDoor(Landscape(step_s=0.01, failure=failure))
        record = capture(SPEC, Profile(path="/nowhere"), door, NoJournal())
        assert record.failure == failure
        assert record.blocks == ()

    def test_a_profile_is_not_taken_for_a_run(self) -> None:
        quick = as_profiled(SPEC)
        assert quick.measure != SPEC.measure
        assert quick.measure.max_seconds == 1.0


def command(folder: Path, name: str, body: str) -> None:
    """A program of this name, first on the PATH."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


NCU = """
# As the real one does: starts its target by helpers that close what they inherited, writes when the target has ended.
log = sys.argv[sys.argv.index("--log-file") + 1]
target = sys.argv[sys.argv.index("--metrics") + 2:]
status = subprocess.call(target, close_fds=True)
with open(log, "w") as file:
    file.write('==PROF== Connected\\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\\n')
    if status == 0:
        file.write('"0","ampere_sgemm_128x64_tn","gpu__time_duration.sum","us","1,000.5"\\n')
        file.write('"0","ampere_sgemm_128x64_tn","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","85"\\n')
sys.exit(status)
"""


class TestBehindAProfiler:
    def test_the_worker_calls_back_leaves_in_peace_and_the_files_are_read(self, commands: Path, tmp_path: Path) -> None:
        command(commands, "ncu", NCU)
        record, table = profile_behind(SPEC, TOOLS.get("ncu"), tmp_path / "out")
        assert record.failure is None
        assert record.prepared.numerics.method == "skipped"
        assert record.trace.steps == 1
        assert [(row.name, row.total_ns) for row in table.kernels] == [("ampere_sgemm_128x64_tn", 1_000_500)]
        from redline.analyze.profile import with_tool

        profile = with_tool(table.kernels, table.readings, record, "ncu", table.notes)
        assert profile.bound.label == "memory"
        assert {finding.code for finding in profile.findings} == {"fp32-matmul"}
        assert profile.counters[0].verdict == "memory-bound"

    def test_a_profiler_that_gives_up_is_told_in_its_own_words(self, commands: Path, tmp_path: Path) -> None:
        command(commands, "ncu", 'print("==ERROR== no counters today", file=sys.stderr); sys.exit(3)')
        record, table = profile_behind(SPEC, TOOLS.get("ncu"), tmp_path / "out")
        assert table is None
        assert "no counters today" in record.failure.told

    def test_one_that_runs_its_target_again_and_again_gets_a_script(self, commands: Path, tmp_path: Path) -> None:
        body = """
if sys.argv[1] == "analyze":
    print("│ Metric │ Avg │ Unit │\\n│ L2 Cache Hit Rate │ 50 │ Pct │")
    sys.exit(0)
folder = sys.argv[sys.argv.index("-p") + 1]
target = sys.argv[sys.argv.index("--") + 1:]
for _ in range(2):
    if status := subprocess.call(target):
        sys.exit(status)
os.makedirs(folder)
with open(folder + "/pmc_perf.csv", "w") as file:
    file.write("Kernel_Name,Start_Timestamp,End_Timestamp\\nk,100,250\\n")
"""
        command(commands, "rocprof-compute", body)
        record, table = profile_behind(SPEC, TOOLS.get("rocprof-compute"), tmp_path / "out")
        assert record.trace is not None
        assert table.kernels[0].total_ns == 150
        assert [reading.name for reading in table.readings] == ["l2_hits"]

    def test_a_script_that_breaks_is_told(self, commands: Path, tmp_path: Path) -> None:
        body = 'sys.exit(subprocess.call(sys.argv[sys.argv.index("--") + 1:]))'
        command(commands, "rocprof-compute", body)
        broken = RunSpec(workload=WorkloadSpec(model=f"{MISBEHAVING}:raises"), device="cpu")
        with pytest.raises(DoorError, match="this forward"):
            profile_behind(broken, TOOLS.get("rocprof-compute"), tmp_path / "out")


def test_a_tool_beside_the_path_is_found(commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    hidden = replace(TOOLS.get("ncu"), also_in=(str(tmp_path / "b*"),))
    command(commands, "ncu", "")
    assert find_tool(hidden) == str(commands / "ncu")


@pytest.mark.parametrize("name", TOOLS.names())
def test_a_missing_tool_says_how_to_get_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=f"{name} is not installed.*install"):
        find_tool(replace(TOOLS.get(name), also_in=()))


def test_a_tool_for_another_device_is_refused(commands: Path) -> None:
    command(commands, "ncu", "")
    assert find_tool(TOOLS.get("ncu")) == str(commands / "ncu")
    check_device(TOOLS.get("ncu"), "cuda:1")
    with pytest.raises(UsageError, match="would run on cpu"):
        check_device(TOOLS.get("ncu"), "cpu")
