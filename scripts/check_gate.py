"""The gate on this machine: a model slowed on purpose must be caught, the same model must pass.

    python scripts/check_gate.py                                                  # this CPU: 20 of each, 10 % slower
    python scripts/check_gate.py --device cuda --runs 10 --slow-runs 1 --slowdown 0.03 --budget 100

A small git project is committed and changed: one of its two models gets more layers, the other stays. One `redline gate`
then measures every run against the commit, in fresh processes of both sides that take turns; of the last run of each
model kernels are counted too (on a CPU, operators). With a budget of less than 75 s per run a GPU's processes are
prepared side by side. Exits with 1 where a slowdown or an added kernel was missed, or more than one run of twenty
without any was called slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from raw_records import RawRecords

LAYERS = 100
MODEL = """
import torch


class Net(torch.nn.Module):
    # One layer, again and again: so many kernels, and hardly any weights to build in each process.
    def __init__(self, layers):
        super().__init__()
        self.layer = torch.nn.Linear({width}, {width})
        self.layers = layers

    def forward(self, x):
        for _ in range(self.layers):
            x = self.layer(x)
        return x


def same(batch={batch}):
    return Net({layers}).eval(), (torch.randn(batch, {width}),)


def slowed(batch={batch}):
    return Net({slowed}).eval(), (torch.randn(batch, {width}),)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="gates without a change")
    parser.add_argument("--slow-runs", type=int, help="gates with the slowdown; default: as many")
    parser.add_argument("--slowdown", type=float, default=0.10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=2400.0, help="seconds for all gates together")
    parser.add_argument("--out", type=Path, help="a folder for the records")
    arguments = parser.parse_args()
    slow_runs = arguments.runs if arguments.slow_runs is None else arguments.slow_runs
    names = ["same"] * arguments.runs + ["slowed"] * slow_runs
    started = time.monotonic()
    with RawRecords(arguments.out) as raw:
        rows = gate(names, arguments.slowdown, arguments.device, arguments.budget, raw.history("gate"))
    for row in rows:
        change = "" if row["change"] is None else f"{row['change']:+.2%}"
        told = " ".join(each["text"] for each in row["reasons"])
        told += " ".join(f"{each['name']} {each['baseline']} → {each['candidate']}" for each in row["checks"])
        print(f"{row['name']:<12}{row['verdict']:<14}{change:>8}  {row['candidate_processes']} processes  {told}")
    found = {
        kind: Counter(row["verdict"] for row in rows if row["name"].startswith(kind)) for kind in ("same", "slowed")
    }
    print(f"same code: {dict(found['same'])}; {arguments.slowdown:.0%} slower: {dict(found['slowed'])}")
    print(f"{time.monotonic() - started:.0f} s")
    missed = slow_runs - found["slowed"]["slower"]
    more_kernels = {row["name"].startswith("slowed") for row in rows for each in row["checks"] if each["failed"]}
    wrong = found["same"]["slower"] > arguments.runs // 20 or missed > slow_runs // 20
    sys.exit(wrong or more_kernels != ({True} if slow_runs else set()))


def gate(names: list[str], slowdown: float, device: str, budget_s: float, history: Path) -> list[dict[str, Any]]:
    """The rows of one gate with so many runs of each model; its records go into a history."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "project"
        folder.mkdir()
        size = {"width": 2048, "batch": 256} if device != "cpu" else {"width": 128, "batch": 32}
        (folder / "model.py").write_text(MODEL.format(layers=LAYERS, slowed=LAYERS, **size))
        (folder / "bench.toml").write_text(bench_file(names, slowdown, device))
        git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
        for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *words], cwd=folder, check=True)
        (folder / "model.py").write_text(MODEL.format(layers=LAYERS, slowed=round(LAYERS * (1 + slowdown)), **size))
        words = ["gate", "bench.toml", "--baseline", "main", "--budget", str(budget_s), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "redline", *words],
            cwd=folder,
            env={**os.environ, "REDLINE_STORE": str(history)},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode not in (0, 1, 3) or not done.stdout:
            sys.exit(f"the gate itself failed with {done.returncode}")
        rows: list[dict[str, Any]] = json.loads(done.stdout)["benchmarks"]
        return rows


def bench_file(names: list[str], slowdown: float, device: str) -> str:
    lines = [f'device = "{device}"', f"threshold = {slowdown}"]
    # Short blocks: what differs between processes is learned from processes.
    block_s = 0.1 if device == "cpu" else 0.06
    lines.append(f"measure = {{ block_seconds = {block_s}, check_numerics = false }}")
    lines += ["threads = 1"] if device == "cpu" else []
    last = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        lines += ["[[run]]", f'name = "{name} {number}"', f'model = "model.py:{name}"']
        lines += ['fail_on = ["kernels"]'] if number == last[name] else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
