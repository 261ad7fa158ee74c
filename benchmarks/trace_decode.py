"""How fast a trace becomes tables, and in how much memory, against `json.load` and, where installed, HTA's loader.

Makes a trace (tests/kineto.py, with Python stacks as `with_stack` writes them), then reads it in fresh processes, one
after the other, in turns. Redline goes the whole way from the file to every table, the bound and the findings;
`json.load` only reads; HTA loads into its data frame.

    python benchmarks/trace_decode.py [--megabytes 200] [--rounds 3] [--large] [--names]

`--large` adds a file of 1 GB, `--names` one with 200 000 distinct kernel names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TARGET_RATE = 90.0
TARGET_RSS = {200: 130.0, 1000: 600.0}
"""Peak resident MB by size of the file in MB."""
TARGET_NAMES_S = 5.0
NAMES = "names.json"


def redline(path: Path) -> None:
    from redline.analyze.profile import profile_of
    from redline.trace.decode import read_trace

    profile_of([read_trace(path)])


def json_load(path: Path) -> None:
    with path.open("rb") as file:
        json.load(file)


def hta(path: Path) -> None:
    from hta.common.trace_parser import parse_trace_file

    parse_trace_file(str(path))


READERS: dict[str, Callable[[Path], None]] = {"redline": redline, "json.load": json_load, "hta": hta}


def many_names(path: Path, count: int = 200_000) -> None:
    """As generated kernels may have them: every one with a name of its own, and a long one."""
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for number in range(count):
            name = f"void ns{number % 97}::kernel_{number}<float, Functor{number}, {'Tile<16, 16>, ' * 20}4>(int)"
            event = {
                "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 10 * number, "dur": 9,
                "args": {"device": 0, "stream": 7, "correlation": number + 1},
            }  # fmt: skip
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("]}")


def measure_here(reader: str, path: Path) -> None:
    """In a process of its own: prints wall seconds, processor seconds and peak resident bytes."""
    started, worked = time.perf_counter(), time.process_time()
    READERS[reader](path)
    wall, cpu = time.perf_counter() - started, time.process_time() - worked
    # getrusage would tell the peak of the process this one was forked from.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"wall": wall, "cpu": cpu, "rss": peak}))


def measured(reader: str, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", reader, str(path)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def compare(path: Path, readers: list[str], rounds: int) -> None:
    with path.open("rb") as file:  # into the page cache, for all of them alike
        while file.read(1 << 24):
            pass
    megabytes = path.stat().st_size / 1e6
    found = {reader: [] for reader in readers}
    for _ in range(rounds):
        for reader in readers:
            found[reader].append(measured(reader, path))
    print(f"\n{megabytes:.0f} MB, {rounds} rounds, medians")
    print(f"{'reader':<12} {'wall s':>8} {'MB/s':>8} {'cpu s':>8} {'MB/s of cpu':>12} {'peak RSS MB':>12}")
    for reader, runs in found.items():
        wall, cpu, rss = (statistics.median(run[key] for run in runs) for key in ("wall", "cpu", "rss"))
        print(
            f"{reader:<12} {wall:>8.2f} {megabytes / wall:>8.1f} {cpu:>8.2f} {megabytes / cpu:>12.1f} {rss / 1e6:>12.0f}"
        )
    if path.name == NAMES:
        print(f"target of redline: at most {TARGET_NAMES_S:.0f} s of cpu")
        return
    limit = TARGET_RSS.get(round(megabytes, -2))
    memory = f" and at most {limit:.0f} MB resident" if limit else ""
    print(f"target of redline: at least {TARGET_RATE:.0f} MB/s of cpu{memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="a file of 1 GB too, by redline alone")
    parser.add_argument("--names", action="store_true", help="a file of 200 000 kernel names too; target: 5 s")
    parser.add_argument("--only", nargs=2, metavar=("READER", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        measure_here(given.only[0], Path(given.only[1]))
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from kineto import training_trace

    readers = ["redline", "json.load"]
    if importlib.util.find_spec("hta"):
        readers.append("hta")
    else:
        print("HTA is not installed: pip install HolisticTraceAnalysis to set it beside")
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as folder:
        path = Path(folder) / "trace.json"
        training_trace(path, megabytes=given.megabytes)
        compare(path, readers, given.rounds)
        if given.large:
            training_trace(path, megabytes=1000)
            compare(path, ["redline"], 1)
        if given.names:
            path = path.with_name(NAMES)
            many_names(path)
            compare(path, ["redline"], given.rounds)


if __name__ == "__main__":
    main()
