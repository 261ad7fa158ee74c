"""How long `redline --help` takes, against an interpreter that does nothing.

The two take turns in random order, so that a busy moment of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

TARGET_S = 0.3


def seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        # Beside this interpreter, not from PATH: the one that was installed with what is measured.
        "redline --help": [str(Path(sys.executable).parent / "redline"), "--help"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        seconds_of(command)  # the first start reads files from the disk
    for _ in range(rounds):
        for name in random.sample(list(commands), len(commands)):
            samples[name].append(seconds_of(commands[name]))
    bare, ours = (statistics.median(samples[name]) for name in commands)
    for name, values in samples.items():
        print(f"{name:<16} {statistics.median(values):7.3f} s   (fastest {min(values):.3f}, slowest {max(values):.3f})")
    print(f"{'ratio':<16} {ours / bare:7.1f} ×   ({rounds} rounds; target: --help within {TARGET_S} s)")


if __name__ == "__main__":
    main()
