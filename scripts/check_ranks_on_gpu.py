"""Ranks on the GPU at hand: too many are refused with the reason, and one rank through torchrun costs nothing.

First asks for one rank more than there are GPUs, which must be refused. Then, for each recipe, opens one worker through
the fork door and one as the only rank of torchrun, prepares both, and times them in alternating blocks. Prints the
medians and their ratio; exits 1 where torchrun costs 2 % or more, or where nothing is refused. About 50 s on an H200.

    python scripts/check_ranks_on_gpu.py [--model resnet50] [--batch 32] [--turns 12] [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TypeVar

import redline
from redline.api.workspace import Workspace
from redline.launch import Session, open_door
from redline.model.errors import RedlineError
from redline.model.protocol import BlockReply, FailureReply, Measure, Prepare, PreparedReply, Reply
from redline.model.questions import AskHealth, Health
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table

RECIPES = ("baseline", "fp16+channels-last+graphs")
DOORS = ("fork", "torchrun")
WITHIN = 0.02
BLOCK_S = 0.3
R = TypeVar("R")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="resnet50")
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--turns", type=int, default=12)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--recipe", action="append", help="instead of the usual two; repeatable")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    lines = [refusal(given.model, given.device)]
    print(lines[0], flush=True)
    for recipe in given.recipe or RECIPES:
        lines.append(cost(given.model, given.batch, recipe, given.turns, given.device))
        print(lines[-1], flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "ranks.txt").write_text("\n".join(lines) + "\n")
    return 1 if any(line.startswith("NOT") for line in lines) else 0


def refusal(model: str, device: str) -> str:
    """What is said to one rank too many."""
    if device == "cpu":
        return "ok  nothing to refuse: ranks may share a CPU, and are marked"
    with Workspace(keep=False) as workspace:
        devices = workspace.ask(AskHealth(), Health).devices
        ranks = sum(each.kind != "cpu" for each in devices) + 1
        try:
            redline.run(model, ranks=ranks, batch=ranks, device=device, task="train", workspace=workspace)
        except RedlineError as error:
            said = str(error)
        else:
            return f"NOT refused: {ranks} ranks on {ranks - 1} GPUs were measured"
    return f"{'ok ' if 'share a GPU' in said else 'NOT'} {ranks} ranks on {ranks - 1} GPU(s) refused: {said}"


def cost(model: str, batch: int, recipe: str, turns: int, device: str) -> str:
    """One rank of torchrun against the fork door, block by block in turns."""
    samples: dict[str, list[float]] = {door: [] for door in DOORS}
    with ExitStack() as stack:
        sessions = {door: prepared(stack, spec_of(model, batch, recipe, door, device)) for door in DOORS}
        for turn in range(turns):
            for door in DOORS if turn % 2 else DOORS[::-1]:
                reply = sessions[door].ask(Measure(kind="throughput", seconds=BLOCK_S))
                samples[door].append(median(of_kind(BlockReply, reply, door).block.samples))
    fork_s, torchrun_s = (median(samples[door]) for door in DOORS)
    ratio = torchrun_s / fork_s
    return (
        f"{'ok ' if ratio < 1 + WITHIN else 'NOT'} {recipe}: fork {fork_s * 1e3:.3f} ms, torchrun with one rank "
        f"{torchrun_s * 1e3:.3f} ms a step, ratio {ratio:.4f} (median of {turns} blocks each, in turns)"
    )


def spec_of(model: str, batch: int, recipe: str, door: str, device: str) -> RunSpec:
    table = {"model": model, "batch": batch, "recipe": recipe, "effort": "quick", "device": device, "no_check": True}
    (spec,) = specs_from_table({**table, "launch": {"door": door}, "ranks": 1})
    return spec


def prepared(stack: ExitStack, spec: RunSpec) -> Session:
    door = open_door(spec.launch)
    stack.callback(door.close)
    session = door.open(spec)
    stack.callback(session.close)
    of_kind(PreparedReply, session.ask(Prepare(spec=spec)), spec.launch.door)
    return session


def of_kind(kind: type[R], reply: Reply, door: str) -> R:
    if isinstance(reply, kind):
        return reply
    raise SystemExit(f"{door}: {reply.failure.told if isinstance(reply, FailureReply) else reply}")


if __name__ == "__main__":
    sys.exit(main())
