"""The command line as a person or a script meets it: stdout, stderr, exit codes and what stays behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from invoking import invoke as redline
from invoking import results
from typer.testing import Result

from redline.bench.recipe.base import SWITCHES
from redline.cli.main import RENAMED, Interrupts
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.search.grid import grid_from_tables
from redline.store import History
from redline.verbs import GROUPS, NAMES
from redline.verbs.run import Measured

PROGRAM = [sys.executable, "-m", "redline.cli.main"]
MISBEHAVING = Path(__file__).parent.parent / "models" / "misbehaving.py"

TINY = """
device = "cpu"
threads = 1

[measure]
max_seconds = 0.15
block_seconds = 0.03
min_rounds = 2
min_samples = 2
tail_samples = 2
warmup_min_seconds = 0.02
warmup_max_seconds = 0.1
warmup_min_steps = 2
warmup_window = 2
loss_path_steps = 4
"""
"""As little as makes a record: these tests are about what is printed, not about what was measured."""

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

class Picky(Net):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise RuntimeError("\\"polygamma\\" not implemented for 'Half'")
        return super().forward(x)

class Breaks(Net):
    def forward(self, x):
        raise ValueError("expected four channels\\nand got three")
"""

WriteModel = Callable[..., str]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_gpus(monkeypatch)


def hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine everywhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    for variable in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    return str(file)


@pytest.fixture
def model(tmp_path: Path) -> WriteModel:
    """Writes a file with a factory of the user's and says how one writes it on the command line."""

    return partial(write_model, tmp_path)


def write_model(
    folder: Path, factory: str, body: str = "return Net(), torch.randn(2, 4)", name: str = "mine.py"
) -> str:
    file = folder / name
    file.write_text(f"{NET}\n\ndef {factory}:\n    {body}\n")
    return f"{file}:{factory.partition('(')[0]}"


def command(line: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a line in a process of its own, where descriptors and exit codes are real."""
    return subprocess.run(
        [*PROGRAM, *shlex.split(line), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
    )


def measure(*arguments: str, exit_code: int = 0) -> list[dict[str, Any]]:
    result = redline("run", *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return results(result)


def history(place: Path) -> list[RunRecord]:
    with History.open(place) as opened:
        return opened.find(newest_first=False)


def complaint(result: Result | subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, without the name in front."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("redline: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return lines[0].removeprefix("redline: ")


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A history with two recipes, one of which failed, and their rows."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "tiny.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as monkeypatch:
        hide_gpus(monkeypatch)
        monkeypatch.setenv("REDLINE_STORE", str(folder / "history.sqlite"))
        monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
        asked = [
            write_model(folder, "make()"),
            "-f",
            str(folder / "tiny.toml"),
            "-r",
            "baseline",
            "-r",
            "channels-last",
        ]
        return folder / "history.sqlite", measure(*asked, exit_code=5)


@pytest.fixture
def measured(measured_once: tuple[Path, list[dict[str, Any]]], own_history: Path) -> list[dict[str, Any]]:
    """Two recipes in this test's own history, one of which failed."""
    store, rows = measured_once
    with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(own_history)) as target:
        source.backup(target)
    return rows


# What run prints


def test_each_result_is_told_once_beside_the_answer(tiny: str) -> None:
    result = redline("run simple_cnn --batch 2 -r baseline -r channels-last -f", tiny)
    assert result.exit_code == 0, result.output
    assert re.search(r"baseline|too noisy", result.stdout.splitlines()[0]), "the answer comes first"
    assert result.stderr.count("channels-last") == 1, "one line for each result, and not on stdout"


@pytest.mark.usefixtures("brief")
def test_json_is_one_document_on_stdout_and_nothing_else(own_history: Path, tiny: str) -> None:
    done = command("run simple_cnn --batch 2 -r baseline -r channels-last -r tf32 --json -f", tiny)
    assert done.returncode == 5, done.stderr  # no TF32 on a CPU
    document = json.loads(done.stdout)  # anything beside the one document would not parse
    assert done.stdout.startswith("{")
    assert done.stdout.endswith("}\n")
    assert list(document)[:2] == ["schema", "verb"]
    first, second, failed = document["tables"]["results"]
    for row in (first, second):
        assert (row["model"], row["task"], row["batch"], row["device"]) == ("simple_cnn", "infer", 2, "cpu")
        speed = row["throughput"]
        if "low" in speed:  # on a busy machine there may be too few rounds for an interval
            assert speed["low"] <= speed["value"] <= speed["high"]
        for name, fewest in (("latency_p90", 64), ("latency_p95", 130), ("latency_p99", 662)):
            assert (name not in row) == (row["samples"]["value"] < fewest)
        assert {"latency_p50", "memory", "build_time", "first_call_time", "bound", "trust", "record_id"} <= row.keys()
        assert "failure" not in row
    assert second["tolerance"]["value"] > second["signal_error"]["value"]
    assert ("ratio" in first, "ratio" in second, second["compared_with"]) == (False, True, "baseline")
    assert failed["failure"].startswith("unsupported at ")
    assert "throughput" not in failed
    assert "Traceback" not in done.stderr
    ids = [row["record_id"] for row in document["tables"]["results"]]
    assert {record.id for record in history(own_history)} == set(ids), "what was printed is in the history"


# From words to specs


@pytest.fixture
def specs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RunSpec]]:
    """What would be measured, without measuring it."""
    kept: list[RunSpec] = []

    def keep(tables: Sequence[dict[str, Any]], *more: Any, **known: Any) -> Measured:
        kept[:] = grid_from_tables(tables, where=known["where"]).cells
        return Measured()

    monkeypatch.setattr("redline.verbs.run.measure", keep)

    def parse(line: str) -> list[RunSpec]:
        result = redline(f"run {line}")
        assert result.exit_code == 0, result.output
        return list(kept)

    return parse


def test_every_flag_reaches_its_field(specs_of: Callable[..., list[RunSpec]]) -> None:
    (spec,) = specs_of(
        "resnet50 --batch 3 --image-size 64 --classes 7 --task train --optimizer adamw --device cpu --threads 2"
        " --effort strict --tail --door spawn --seed 9"
    )
    workload = spec.workload
    assert (workload.batch, workload.image_size, workload.classes) == (3, 64, 7)
    assert (workload.task, workload.optimizer) == ("train", "adamw")
    assert (spec.device, spec.threads, spec.seed, spec.launch.door) == ("cpu", 2, 9, "spawn")
    assert (spec.measure.effort, spec.measure.tail_samples) == ("strict", 662)
    (spec,) = specs_of("transformer --sequence-length 16")
    assert spec.workload.sequence_length == 16
    assert [spec.workload.model for spec in specs_of("resnet18 resnet50")] == ["resnet18", "resnet50"]


def test_a_file_says_what_to_run_and_flags_overrule_it(
    specs_of: Callable[..., list[RunSpec]], tmp_path: Path, tiny: str
) -> None:
    file = tmp_path / "runs.toml"
    file.write_text(
        'batch = 4\neffort = "quick"\n[[run]]\nmodel = "resnet18"\nrecipe = ["baseline", "channels-last"]\n'
        '[[run]]\nmodel = ["resnet34", "resnet50"]\nbatch = 8\n'
    )
    specs = specs_of(f"--file {file}")
    assert [(spec.workload.model, spec.workload.batch, str(spec.recipe)) for spec in specs] == [
        ("resnet18", 4, "baseline"), ("resnet18", 4, "channels-last"), ("resnet34", 8, "baseline"),
        ("resnet50", 8, "baseline"),
    ]  # fmt: skip
    assert {spec.measure.effort for spec in specs} == {"quick"}
    assert {spec.workload.batch for spec in specs_of(f"-f {file} -b 2")} == {2}
    (spec,) = specs_of(f"simple_cnn -f {tiny}")
    assert spec.measure.max_seconds == 0.15


# Bad input


@pytest.mark.parametrize(
    ("factory", "recipe", "kind", "stage", "says"),
    [
        ("return Picky(), torch.randn(2, 4)", "fp16", "unsupported", "first-call", "\"polygamma\" not implemented"),
        ("return Net(), torch.randn(2, 4)", "tf32", "unsupported", "recipe", "TF32 is a format of NVIDIA"),
        ("return Net(), torch.randn(2, 4)", "channels-last", "unsupported", "recipe", "no convolution weights"),
        ("return Net(), torch.randn(2, 4)", "compile:backend=nope", "compile", "recipe", "Invalid backend: 'nope'"),
    ],
    ids=["op-lacks-fp16", "no-tf32-here", "no-channels", "no-such-backend"],
)  # fmt: skip
def test_a_recipe_that_breaks_is_a_failed_row_and_the_others_still_run(
    tiny: str, model: WriteModel, factory: str, recipe: str, kind: str, stage: str, says: str
) -> None:
    place = model("make()", factory)
    rows = measure(place, "-f", tiny, "-r", "baseline", "-r", recipe, "-r", "bf16", exit_code=5)
    sound, broken, last = rows
    assert sound["throughput"]["value"] > 0
    assert broken["failure"].startswith(f"{kind} at {stage}: ")
    assert says in broken["failure"]
    assert "\n" not in broken["failure"]
    assert ("failure" in last) == ("throughput" not in last) == ("Picky" in factory)


# Where it is printed


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["latin-1", "ascii"],
)
def test_characters_that_the_terminal_lacks_are_replaced(
    measured: list[dict[str, Any]], environment: dict[str, str]
) -> None:
    row = measured[0]
    done = command("history show", row["record_id"], **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not redline("history show", row["record_id"]).stdout.isascii()
    assert re.search(r"^baseline ", done.stdout, re.MULTILINE), done.stdout
    assert command("run --help", **environment).returncode == 0


def test_a_name_that_the_locale_cannot_read_is_a_mistake(model: WriteModel, own_history: Path) -> None:
    place = model("make()", name="größe.py")
    done = command("run", place, "--json", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2
    assert "is not Unicode in this locale: set LC_ALL=C.UTF-8" in complaint(done)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments", [["history", "show"], ["history", "show", "--json"], ["run", "--help"], ["--version"]], ids=" ".join
)
def test_a_full_disk_is_one_line(arguments: list[str], own_history: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "redline: cannot write to stdout: No space left on device\n"


def test_help_names_every_command_and_every_step() -> None:
    overview = redline("-h")
    assert overview.exit_code == 0
    assert overview.stdout == redline("--help").stdout
    for name in NAMES:
        assert re.search(rf"^\s+{name}\s", overview.stdout, re.MULTILINE)
    assert re.findall(r"^(\S.*):$", overview.stdout, re.MULTILINE) == list(GROUPS)
    lines = overview.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    told = "".join(redline("run --help").stdout.split())  # lines may end at a hyphen
    # Other tests plant faults as steps of their own.
    assert [step for step in SWITCHES if step not in told and not step.startswith("fault-")] == []
    assert re.fullmatch(r"\d+\.\d+.*\n", redline("--version").stdout)


def test_a_removed_command_names_the_new_one() -> None:
    for name, now in RENAMED.items():
        done = redline(name, "resnet50", "--no-such-option", "--help")
        assert (done.exit_code, complaint(done)) == (2, f"'{name}' is now '{now}'")
        words = now.split()
        shown = redline(*(word for word in words if not word.startswith("--")), "--help")
        assert shown.exit_code == 0, now
        assert all(word in shown.stdout for word in words), now


# Ctrl-C


ENDLESS = TINY.replace("\nmax_seconds = 0.15", "\nmax_seconds = 600").replace("min_rounds = 2", "min_rounds = 100000")


def hear_ctrl_c() -> None:
    """Whoever runs the tests in the background has told them, and all they start, to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(marker: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *arguments],
        env={**os.environ, "REDLINE_TEST_MARKER": marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def wait_for(running: subprocess.Popen[str], sign: Callable[[], bool]) -> None:
    while not sign():
        assert running.poll() is None, "it ended before there was a sign of it"
        time.sleep(0.02)


def has_blocks(place: Path) -> bool:
    """Whether any block of a record is written down: what is measured at length is kept as it comes."""
    return place.exists() and any(record.blocks for record in history(place))


def interrupt(running: subprocess.Popen[str]) -> tuple[str, str]:
    """As a terminal does: to the whole group in front."""
    os.killpg(running.pid, signal.SIGINT)
    return running.communicate(timeout=300)


def marked_processes(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("REDLINE_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(marker: str) -> None:
    deadline = time.monotonic() + 60
    while (left := marked_processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(
    tmp_path: Path, own_history: Path, model: WriteModel
) -> None:
    marker = f"redline-interrupted-{os.getpid()}"
    endless = tmp_path / "endless.toml"
    endless.write_text(ENDLESS)
    running = start(marker, "run", model("make()"), "-f", str(endless), "-r", "baseline", "-r", "bf16", "--json")
    wait_for(running, lambda: has_blocks(own_history))
    assert len(marked_processes(marker)) >= 4, "the desk, the server and two workers"
    stdout, stderr = interrupt(running)
    assert running.returncode == 130
    assert stdout == ""
    assert [line for line in stderr.splitlines() if line.startswith("redline: ")] == [
        "redline: interrupted; what was measured is kept: 'redline history show' lists it"
    ]
    assert stderr.splitlines()[-1].startswith("redline: interrupted")
    assert "Traceback" not in stderr
    assert_nothing_left(marker)
    kept = history(own_history)
    assert [str(record.spec.recipe) for record in kept] == ["baseline", "bf16"]
    assert {record.stopped for record in kept} == {"interrupted"}
    assert any(record.blocks for record in kept)
    with History.open(own_history) as opened:
        assert {row.status for row in opened.rows()} == {"interrupted"}
    shown = redline("history show", kept[0].id)
    assert "interrupted" in shown.stdout


def test_a_second_ctrl_c_leaves_at_once_without_a_traceback(
    tmp_path: Path, own_history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker hangs in a block, so that closing it in good order takes its time."""
    marker = f"redline-interrupted-twice-{os.getpid()}"
    monkeypatch.setenv("REDLINE_TEST_FOLDER", str(tmp_path))
    endless = tmp_path / "endless.toml"
    endless.write_text(f"{ENDLESS}\n[launch]\nclose_timeout_s = 600\n")
    running = start(marker, "run", f"{MISBEHAVING}:hangs_when_told", "-f", str(endless))
    wait_for(running, lambda: has_blocks(own_history))
    (tmp_path / "hang").touch()
    while not (tmp_path / "hanging").exists():
        assert running.poll() is None
        time.sleep(0.01)
    deadline = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < deadline:  # two that come while it stands still are one
        os.killpg(running.pid, signal.SIGINT)
        time.sleep(2 * Interrupts.SAME_S)
    _, stderr = running.communicate(timeout=300)
    assert running.returncode == 130
    assert stderr.splitlines()[-1] == "redline: interrupted again; exiting now"
    assert "Traceback" not in stderr
    assert_nothing_left(marker)


def test_signals_at_the_same_moment_are_one_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    left: list[int] = []
    monkeypatch.setattr("redline.cli.main.time.monotonic", lambda: now[0])
    monkeypatch.setattr("redline.cli.main.os._exit", left.append)
    monkeypatch.setattr("redline.cli.main.os.write", lambda descriptor, text: None)
    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupts(signal.SIGINT, None)
    now[0] += Interrupts.SAME_S
    interrupts(signal.SIGINT, None)
    assert left == []
    now[0] += 0.01
    interrupts(signal.SIGINT, None)
    assert left == [130]


@pytest.mark.parametrize("words", [("--version",), ("run", "resnet18", "--batch", "0"), ("history", "show", "--json")])
def test_with_every_stream_closed_nothing_is_printed_and_the_code_stands(words: tuple[str, ...]) -> None:
    command = [*PROGRAM, *words]
    expected = subprocess.run(command, capture_output=True, check=False).returncode
    closed = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], capture_output=True, check=False)
    assert (closed.returncode, closed.stdout, closed.stderr) == (expected, b"", b"")
