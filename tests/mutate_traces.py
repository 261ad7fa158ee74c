"""A hundred thousand damaged traces: no traceback, nothing that takes longer than five seconds, no impossible figure.

    python tests/mutate_traces.py [--first 0] [--count 100000] [--seed 0] [--jobs 2] [--traces FOLDER] [--keep FOLDER]

The traces come from tests/mutations.py; `--traces` adds those of a folder, cut to their first events. What fails is
kept in `--keep` under its number; the same number and seed make the same file anywhere.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType

from mutations import impossible, mutated, profile_all, seeds

from redline.trace.events import TraceFile

LONGEST_S = 5
"""Of processor time: a busy machine is not the trace's fault."""
CUT_BYTES = 16_000
BATCH = 500
TERMINAL_EVERY = 8
"""One in so many is also printed as for a terminal: that takes longer than all the rest."""


class TookTooLong(Exception):
    pass


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


def cut(path: Path) -> bytes:
    """The beginning of a large trace, up to a whole event."""
    text = next(TraceFile(path).blocks())
    begin = text.index(b'"traceEvents"')
    end = text.rfind(b"},", 0, begin + CUT_BYTES)
    return text[: end + 1] + b"]}"


def check(originals: list[bytes], numbers: range, seed: int, keep: Path | None) -> Counter[str]:
    """How many of these were read, refused and failed; each failure is printed."""
    found: Counter[str] = Counter()
    signal.signal(signal.SIGPROF, _too_long)
    with tempfile.TemporaryDirectory(prefix="redline-mutations-") as folder:
        path = Path(folder) / "a.json"
        for number, (what, text) in zip(numbers, mutated(originals, numbers, seed), strict=True):
            path.write_bytes(text)
            signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
            try:
                profile = profile_all(path, terminal=number % TERMINAL_EVERY == 0)
                wrong = impossible(profile) if profile is not None else []
                found["refused" if profile is None else "read"] += 1
            except TookTooLong:
                wrong = [f"took longer than {LONGEST_S} s"]
            except Exception:
                wrong = [traceback.format_exc()]
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if wrong:
                found["failed"] += 1
                print(f"{what}\n  " + "\n  ".join(wrong[:3]), flush=True)
                if keep is not None:
                    (keep / f"{seed}-{number}.json").write_bytes(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to go on with a stopped run")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--traces", type=Path, help="a folder of real traces to damage as well")
    parser.add_argument("--keep", type=Path, help="where to put the files that fail")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    originals = seeds()
    if given.traces is not None:
        originals += [cut(path) for path in sorted(given.traces.glob("*.json*"))]
    end = given.first + given.count
    batches = [range(first, min(first + BATCH, end)) for first in range(given.first, end, BATCH)]
    found: Counter[str] = Counter()
    with ProcessPoolExecutor(given.jobs) as pool:
        waiting = [pool.submit(check, originals, batch, given.seed, given.keep) for batch in batches]
        for batch, done in zip(batches, waiting, strict=True):
            found += done.result()
            print(f"up to {batch.stop - 1:,}: {_told(found)}", file=sys.stderr, flush=True)
    print(f"{given.count:,} mutations: {_told(found)}")
    sys.exit(1 if found["failed"] else 0)


def _told(found: Counter[str]) -> str:
    return f"{found['read']:,} read, {found['refused']:,} refused, {found['failed']:,} failed"


if __name__ == "__main__":
    main()
