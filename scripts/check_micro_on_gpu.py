"""`micro_benchmarking_pytorch.py` against `redline run` on the GPU at hand: throughput within 2 %, in the same call.

ResNet-50, training and inference, fp32 and fp16. Prints one line per case and exits 1 when one is farther apart.

    python scripts/check_micro_on_gpu.py [--batch 64] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from raw_records import RawRecords

import redline
from redline.api.workspace import Workspace

WITHIN = 0.02
CASES = (
    ("training", "fp32", ["--fp16", "0"], "baseline"),
    ("training", "fp16", ["--fp16", "1"], "fp16"),
    ("inference", "fp32", ["--fp16", "0"], "baseline"),
    ("inference", "fp16", ["--fp16", "1"], "fp16"),
)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--iterations", type=int, default=100)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    with RawRecords(given.out) as raw, Workspace(journal=raw.journal) as workspace:
        return check(given, workspace)


def check(given: argparse.Namespace, workspace: Workspace) -> int:
    lines, is_met = [], True
    for mode, precision, words, recipe in CASES:
        script = by_script(mode, words, given.batch, given.iterations)
        task = "train" if mode == "training" else "infer"
        (row,) = redline.run(
            "resnet50", recipes=recipe, task=task, batch=given.batch, effort="quick", device="cuda", workspace=workspace
        )
        if row.failure is not None or not row.throughput_per_s:
            lines.append(f"{mode} {precision}: {row.failure.message if row.failure else 'not measured'}")
            is_met = False
            continue
        ratio = script / row.throughput_per_s
        is_met = is_met and abs(ratio - 1) <= WITHIN
        lines.append(
            f"{mode} {precision}: script {script:,.0f} img/s, run {row.throughput_per_s:,.0f}, ratio {ratio:.4f}"
        )
        print(lines[-1], flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "micro.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if is_met else 1


def by_script(mode: str, words: list[str], batch: int, iterations: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            sys.executable,
            "examples/micro_benchmarking_pytorch.py",
            "--network",
            "resnet50",
            "--mode",
            mode,
            *words,
        ]
        command += ["--batch-size", str(batch), "--iterations", str(iterations), "--output-file", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the script failed: {done.stderr.strip()[-500:]}")
        return float(json.loads(file.read_text())["throughput_per_s"])


if __name__ == "__main__":
    sys.exit(main())
