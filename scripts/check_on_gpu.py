"""Redline against a plain device-event loop over the same model, on the GPU at hand.

Runs `redline run` through the fork door. Then, for every recipe, a fresh process prepares the same spec and times the
same model object in turns: by Redline's blocks and by a bare PyTorch loop. Prints the medians and their ratios; what the
command said and what its blocks say must each lie within 2 % of the bare loop, for every row that is not host-bound.
Exits 1 when one does not.

    python scripts/check_on_gpu.py [--model resnet50] [--batch 32] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from raw_records import RawRecords

import redline
from redline.api.workspace import Workspace
from redline.cli.progress import LiveObserver
from redline.report.export import export_json

RECIPES = ["baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"]
WITHIN = 0.02
TURNS = 6
SWITCHES = 150


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="resnet50")
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--in-turns", metavar="RECIPE", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.in_turns:
        print(json.dumps(in_turns(given.model, given.batch, given.in_turns)))
        return 0
    with (
        RawRecords(given.out) as raw,
        LiveObserver() as observer,
        Workspace(journal=raw.journal, observer=observer) as workspace,
    ):
        result = redline.run(given.model, recipes=RECIPES, batch=given.batch, device="cuda", workspace=workspace)
    print(result)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "run.json").write_text(export_json(result.records))
        (given.out / "run.txt").write_text(str(result))
    print(
        f"    {'recipe':<44} {'run ms':>8} {'block ms':>9} {'plain ms':>9} {'block/plain':>12} {'run/plain':>10}  bound"
    )
    missed = 0
    for row in result:
        block_s, plain_s = own_process(given.model, given.batch, row.recipe)
        run_s = row.batch / row.throughput_per_s
        met = max(abs(run_s / plain_s - 1), abs(block_s / plain_s - 1)) <= WITHIN
        missed += not met and row.bound.label != "host"
        print(
            f"{'ok ' if met else 'NOT'} {row.recipe:<44} {run_s * 1e3:>8.3f} {block_s * 1e3:>9.3f} {plain_s * 1e3:>9.3f} "
            f"{block_s / plain_s:>12.4f} {run_s / plain_s:>10.4f}  {row.bound.label}: {row.bound.evidence}"
        )
        for each in row.verdict.noted("contended"):
            print(f"    {each}")
    return 1 if missed else 0


def own_process(model: str, batch: int, recipe: str) -> tuple[float, float]:
    command = [sys.executable, __file__, "--model", model, "--batch", str(batch), "--in-turns", recipe]
    block_s, plain_s = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    return block_s, plain_s


def in_turns(model: str, batch: int, recipe: str) -> tuple[float, float]:
    """Medians per step of Redline's blocks and of a plain loop over the very same model."""
    from redline.bench.session import BenchSession
    from redline.model.protocol import BlockReply, Measure, Prepare, PreparedReply
    from redline.model.spec_table import specs_from_table

    (spec,) = specs_from_table({"model": model, "batch": batch, "recipe": recipe, "effort": "quick", "device": "cuda"})
    bench = BenchSession(on_progress=lambda stage, detail: None, isolated=False)
    prepared = bench.handle(Prepare(spec=spec))
    assert isinstance(prepared, PreparedReply), prepared
    setup = bench._step._setup  # the same model object, for the plain loop
    blocks, plain = [], []
    for _ in range(TURNS):
        reply = bench.handle(Measure(kind="throughput", seconds=0.3))
        assert isinstance(reply, BlockReply), reply
        blocks += reply.block.samples
        plain += plain_loop(setup.model, setup.args[0], setup.autocast_dtype)
    return statistics.median(blocks), statistics.median(plain)


def plain_loop(model, x, autocast_dtype) -> list[float]:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(SWITCHES + 1)]
    torch.cuda.synchronize()
    with torch.inference_mode():
        events[0].record()
        for event in events[1:]:
            with torch.autocast("cuda", autocast_dtype or torch.float16, enabled=autocast_dtype is not None):
                model(x)
            event.record()
    torch.cuda.synchronize()
    times = [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(events)]
    return times[SWITCHES // 10 :]


if __name__ == "__main__":
    sys.exit(main())
