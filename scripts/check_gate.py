"""The gate on this machine: a model slowed on purpose must be caught, the same model must pass.

    python scripts/check_gate.py [--runs 20] [--slowdown 0.10] [--device cpu]

Each run makes a small git project, commits it, changes it (or not) and gates it against its commit in fresh processes. On a GPU
the slowdown is planted as extra kernels of the same kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

LAYERS = 100
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear({width}, {width}) for _ in range({layers}))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make(batch={batch}):
    return Net().eval(), (torch.randn(batch, {width}),)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--slowdown", type=float, default=0.10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for one gate")
    arguments = parser.parse_args()
    for name, slowdown in (("same code", 0.0), (f"{arguments.slowdown:.0%} slower", arguments.slowdown)):
        found: Counter[str] = Counter()
        for _ in range(arguments.runs):
            verdict, change = gate(slowdown, arguments.device, arguments.budget)
            found[verdict] += 1
            print(f"{name}: {verdict} {change:+.1%}", flush=True)
        print(f"{name}: {dict(found)} of {arguments.runs}", flush=True)


def gate(slowdown: float, device: str, budget_s: float) -> tuple[str, float]:
    on_gpu = device != "cpu"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "project"
        folder.mkdir()
        size = {"width": 2048, "batch": 256} if on_gpu else {"width": 128, "batch": 32}
        (folder / "model.py").write_text(MODEL.format(layers=LAYERS, **size))
        threads = "" if on_gpu else "threads = 1\n"
        (folder / "bench.toml").write_text(f'device = "{device}"\n{threads}[[run]]\nmodel = "model.py:make"\n')
        git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
        for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *words], cwd=folder, check=True)
        (folder / "model.py").write_text(MODEL.format(layers=round(LAYERS * (1 + slowdown)), **size))
        words = ["gate", "bench.toml", "--baseline", "main", "--budget", str(budget_s), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "redline", *words],
            cwd=folder,
            env={**os.environ, "REDLINE_STORE": str(Path(place) / "history.sqlite")},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1, 3):
            sys.exit(done.stderr)
        (row,) = json.loads(done.stdout)["benchmarks"]
        return row["verdict"], row["change"] or 0.0


if __name__ == "__main__":
    main()
