"""`redline watch` on real scripts, each with timers of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOOP = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self): return 96
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.randn(3, 16, 16), index % 10

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader, held_out = DataLoader(Slow(), batch_size=8), DataLoader(Slow(), batch_size=16)
steps = samples = 0
waited = trained = validated = 0.0
for epoch in range(3):
    began = mark = time.perf_counter()
    for images, targets in loader:
        waited += time.perf_counter() - mark
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        time.sleep(0.004)
        steps, samples = steps + 1, samples + len(images)
        mark = time.perf_counter()
    trained += time.perf_counter() - began
    mark = time.perf_counter()
    with torch.no_grad():
        for images, _ in held_out:
            model(images)
    validated += time.perf_counter() - mark
torch.save(model, "model.pt")
print(json.dumps({"steps": steps, "steps_per_s": steps / trained, "samples_per_s": samples / trained,
                  "data": waited / trained, "validated": validated}), flush=True)
ENDING
"""


def watched(folder: Path, script: str, *command: str, options: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any], int]:
    """What the script printed as JSON, the figures of the summary by name, and the exit code."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "redline", "watch", "--summary", "summary.json", *options, "--",
         *(command or (sys.executable, "train.py"))],
        cwd=folder,
        env={**os.environ, "REDLINE_STORE": str(folder / "history.sqlite"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )  # fmt: skip
    assert (folder / "summary.json").exists(), done.stderr
    told = json.loads(done.stdout.splitlines()[0]) if done.stdout else None
    found = json.loads((folder / "summary.json").read_text())
    (run,) = found["tables"]["run"]
    figures = {name: value["value"] if isinstance(value, dict) else value for name, value in run.items()}
    phases = {row["phase"]: row for row in found["tables"]["phases"]}
    return told, {**found, **figures, "phases": phases}, done.returncode


@pytest.mark.slow
def test_a_loop_with_validation_agrees_with_its_own_timers(tmp_path: Path) -> None:
    told, summary, code = watched(tmp_path, LOOP.replace("ENDING", "os._exit(7)"))
    assert (code, summary["exit_code"], summary["steps"]) == (7, 7, told["steps"])
    # Load on the machine moves both alike; only the first look at the model, a few milliseconds, is not in ours.
    assert summary["steps_per_s"] == pytest.approx(told["steps_per_s"], rel=0.05)
    assert summary["throughput"] == pytest.approx(told["samples_per_s"], rel=0.05)
    phases = summary["phases"]
    assert phases["data"]["step_share"]["value"] == pytest.approx(told["data"], rel=0.05)
    assert sum(row["share"]["value"] for row in phases.values()) == pytest.approx(1.0)
    assert phases["validation"]["time"]["value"] == pytest.approx(told["validated"], rel=0.05)
    assert phases["saving"]["time"]["value"] > 0 < phases["forward"]["time"]["value"]
    assert "data-wait" in {finding["code"] for finding in summary["tables"]["findings"]}
    assert summary["utilisation"] is None
    loaded = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.load('model.pt', weights_only=False))"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "Conv2d" in loaded.stdout, loaded.stderr  # a checkpoint of the watched model needs no Redline
    shown = subprocess.run(
        [sys.executable, "-m", "redline", "history", "show", summary["record_ids"][0], "--json"],
        env={**os.environ, "REDLINE_STORE": str(tmp_path / "history.sqlite")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert '"watch:train.py"' in shown.stdout, shown.stderr


TINY = """
import os, signal, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
ENDING
"""


@pytest.mark.slow
def test_a_script_that_is_killed_keeps_its_steps_and_its_signal(tmp_path: Path) -> None:
    _, summary, code = watched(tmp_path, TINY.replace("ENDING", "os.kill(os.getpid(), signal.SIGKILL)"))
    assert (code, summary["exit_code"], summary["steps"]) == (-9, -9, 25)
    assert summary["throughput"] == pytest.approx(8 * summary["steps_per_s"])


@pytest.mark.slow
def test_ranks_of_torchrun_are_one_training(tmp_path: Path) -> None:
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
os._exit(0)  # at the usual end, threads of gloo abort the process now and then, also without Redline (torch 2.15)
"""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    _, summary, code = watched(tmp_path, script, *launch)
    assert (code, summary["steps"]) == (0, 30)
    assert summary["throughput"] > 1.2 * 8 * summary["steps_per_s"]


def test_a_script_that_ends_while_it_is_profiled_ends_as_always(tmp_path: Path) -> None:
    """torch ends with a segmentation fault where its profiler still runs."""
    script = TINY.replace("range(25)", "range(12)").replace("ENDING", "raise SystemExit(4)")
    _, summary, code = watched(tmp_path, script, options=("--profile",))
    assert (code, summary["exit_code"], summary["steps"]) == (4, 4, 12)
    assert any(note["code"] == "nothing-captured" for note in summary["notes"])


def test_a_history_that_cannot_be_written_does_not_cost_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").mkdir()
    _, summary, code = watched(tmp_path, "", "sh", "-c", "exit 3")
    assert (code, summary["exit_code"], summary["record_ids"]) == (3, 3, [])
    assert summary["notes"][-1]["code"] == "not-kept"


def test_a_command_that_trains_nothing_says_so(tmp_path: Path) -> None:
    _, summary, code = watched(tmp_path, "", "sh", "-c", "exit 3")
    assert (code, summary["exit_code"], summary["steps"], summary["tables"]["findings"]) == (3, 3, 0, [])
