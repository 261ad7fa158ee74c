"""Scripts of many kinds under `redline watch`: its figures beside those of timers placed in the scripts by hand.

    python benchmarks/watch_agreement.py [NAME…]

Aim: steps the same, steps/s, samples/s, the share of waiting for data, and the seconds of validation and acting within 2 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WATCHED = Path(__file__).parent / "watched"
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    **{path.stem: (PYTHON, path.name) for path in sorted(WATCHED.glob("*.py")) if path.stem not in ("own", "parts")},
    "module": (PYTHON, "-m", "package.train", "--width", "8"),
    "ranks": (*TORCHRUN, "ranks.py"),
    "spawned": (PYTHON, "ranks.py", "--spawn", "STORE"),
    "with_accelerate": (PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "with_accelerate.py"),
}  # fmt: skip
AIM = 0.02


def watched(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script says of itself, and what Redline says of it."""
    summary = folder / f"{name}.json"
    command = [str(folder / "store") if word == "STORE" else word for word in COMMANDS[name]]
    environment = {**os.environ, "REDLINE_STORE": str(folder / "history.sqlite"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, "-m", "redline", "watch", "--quiet", "--summary", str(summary), "--", *command],
        cwd=WATCHED,
        env=environment,
        input="1200\n",
        capture_output=True,
        text=True,
    )
    own = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    assert own, done.stderr
    tables = json.loads(summary.read_text())["tables"]
    (run,) = tables["run"]
    phases = {row["phase"]: row for row in tables["phases"]}
    found = {
        "steps": run["steps"]["value"],
        "steps_per_s": run["steps_per_s"]["value"],
        "samples_per_s": run["throughput"]["value"],
    }
    found["data"] = phases["data"]["step_share"]["value"]
    found |= {name: phases[name]["time"]["value"] for name in ("validation", "acting") if name in phases}
    return json.loads(own[-1]), found


COMPARED = ("steps_per_s", "samples_per_s", "data", "validation", "acting")


def main() -> None:
    print(f"{'script':<18}{'steps':>12}" + "".join(f"{name:>20}" for name in COMPARED))
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or COMMANDS:
            own, told = watched(name, Path(folder))
            pairs = {key: (own[key], told.get(key)) for key in COMPARED if own.get(key)}
            off = {key: (theirs or 0.0) / mine - 1 for key, (mine, theirs) in pairs.items()}
            is_near = own["steps"] == told["steps"] and all(abs(each) <= AIM for each in off.values())
            missed += [] if is_near else [name]
            cells = [f"{pairs[key][0]:.4g} {off[key]:+.2%}" if key in pairs else "–" for key in COMPARED]
            print(
                f"{name:<18}{own['steps']:>6}/{told['steps']:<5}" + "".join(f"{cell:>20}" for cell in cells), flush=True
            )
    print(f"{len(missed)} beyond {AIM:.0%}: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
