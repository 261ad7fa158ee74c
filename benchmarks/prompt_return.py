"""How long does the prompt stay away after a command's last output?

Each command is started as a person starts it; the clock runs from the last byte it printed to its end. A plain Python
program that prints and ends is timed in turn with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROUNDS = 3
TARGET_S = 0.2
MODEL = "import torch\n\n\ndef build(batch=4):\n    return torch.nn.Linear(64, 64), torch.randn(batch, 64)\n"


def after_last_output(command: list[str], environment: dict[str, str]) -> float:
    """Seconds from the last output on either stream to the end of the process."""
    read, write = os.pipe()
    process = subprocess.Popen(command, stdout=write, stderr=write, env=environment)
    os.close(write)
    last = time.perf_counter()
    while os.read(read, 65536):
        last = time.perf_counter()
    # The pipe ends with its last holder: a server that lives on would show here, too.
    status = process.wait()
    ended = time.perf_counter()
    os.close(read)
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    return ended - last


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.py"
        model.write_text(MODEL)
        environment = {**os.environ, "REDLINE_STORE": str(Path(folder) / "history.sqlite")}
        quick = [f"{model}:build", "--device", "cpu", "--effort", "quick"]
        commands = {
            "python -c print": [sys.executable, "-c", "print('done')"],
            "redline run": [sys.executable, "-m", "redline", "run", *quick],
            "redline run, 2 recipes": [
                sys.executable, "-m", "redline", "run", *quick, "-r", "baseline", "-r", "bf16",
            ],
            "redline profile": [sys.executable, "-m", "redline", "profile", quick[0], "--device", "cpu"],
            "redline models": [sys.executable, "-m", "redline", "models", "resnet"],
            "redline history show": [sys.executable, "-m", "redline", "history", "show"],
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                seconds[name].append(after_last_output(command, environment))
    for name, found in seconds.items():
        print(f"{name:<24} {median(found):6.3f} s   (fastest {min(found):.3f}, slowest {max(found):.3f})")
    print(f"({ROUNDS} rounds; target: within {TARGET_S} s of the last output)")


if __name__ == "__main__":
    main()
