"""How long it takes to compile the blocks of a training step in several workers at once, against one worker alone.

    python benchmarks/compile_together.py [--model resnet50] [--workers 2] [--recipe …] [--device auto]

Both start with an empty cache of the compiler. Told is the time until the worker is prepared, its check against fp32 included, which is what
a search waits for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

from redline.launch import open_door
from redline.model.protocol import Prepare, PreparedReply, Sharing
from redline.model.record import ColdStart
from redline.model.spec import LaunchSpec, RunSpec
from redline.model.spec_table import specs_from_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--task", default="train")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--recipe", default="channels-last+compile:regional")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    table = {
        "model": given.model,
        "task": given.task,
        "batch": given.batch,
        "image_size": given.image_size,
        "recipe": given.recipe,
        "device": given.device,
        "effort": "quick",
        "threads": 1,
    }
    (spec,) = specs_from_table(table)
    ready_s = {}
    with tempfile.TemporaryDirectory() as folder:
        for helpers in (0, given.workers - 1):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, str(helpers))
            ready_s[helpers], cold = prepared(spec, helpers)
            told = f"its own compiling {cold.compile_s or 0:.1f} s ({cold.compile_cache})"
            print(f"{1 + helpers} workers: ready after {ready_s[helpers]:.1f} s, {told}", flush=True)
    ratio = ready_s[0] / ready_s[given.workers - 1]
    print(f"ratio: {ratio:.2f}× ({given.model} {given.task}, {given.recipe})")


def prepared(spec: RunSpec, helpers: int) -> tuple[float, ColdStart]:
    """Seconds until a worker is prepared beside so many that help it, and its cold start."""
    door = open_door(LaunchSpec())
    sharing: Sharing = "shares" if helpers else "alone"
    door.open(spec).close()  # torch is loaded
    started = time.perf_counter()
    helping = [door.open(spec) for _ in range(helpers)]
    for each in helping:
        each.begin(Prepare(spec=spec, sharing="helps"))
    session = door.open(spec)
    reply = session.ask(Prepare(spec=spec, sharing=sharing))
    seconds = time.perf_counter() - started
    for each in helping:
        each.kill()
    session.close()
    door.close()
    if not isinstance(reply, PreparedReply):
        raise SystemExit(f"it could not be prepared: {reply}")
    return seconds, reply.prepared.cold_start


if __name__ == "__main__":
    main()
