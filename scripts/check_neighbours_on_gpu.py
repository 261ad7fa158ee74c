"""Does a neighbour that is prepared and waits change a measurement on this GPU? And being prepared beside another?

    python scripts/check_neighbours_on_gpu.py [--model resnet50] [--batch 32] [--neighbours 4] [-r RECIPE]…

For each recipe: its blocks alone; with neighbours that are prepared and stand still; with them gone again; and in a fresh process
that was prepared while the neighbours were. `tune --jobs` rests on the first change being below 0.5 %; recipes whose last
column moves are what the race, which prepares one after the other, corrects.
"""

from __future__ import annotations

import argparse
import statistics
import time

from redline.launch import Door, open_door
from redline.launch.door import Session
from redline.model.protocol import BlockReply, Measure, Prepare, PreparedReply
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec

RECIPES = ("baseline", "fp16+channels-last", "fp16+channels-last+graphs", "fp16+channels-last+compile+graphs")
BLOCKS, SECONDS = 12, 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("-r", "--recipe", action="append")
    given = parser.parse_args()
    door = open_door(LaunchSpec())
    try:
        print(f"{'recipe':<44}{'alone ms':>10}{'± within':>10}{'waiting':>10}{'gone':>10}{'prepared beside':>17}")
        for recipe in given.recipe or RECIPES:
            print(row(door, recipe, given.model, given.batch, given.neighbours), flush=True)
    finally:
        door.close()


def row(door: Door, recipe: str, model: str, batch: int, neighbours: int) -> str:
    spec, other = spec_of(recipe, model, batch), spec_of("fp16", model, batch)
    session = opened(door, spec)
    alone, spread = timed(session)
    others = [opened(door, other) for _ in range(neighbours)]
    for each in others:
        each.pause()
    waiting, _ = timed(session)
    for each in others:
        each.kill()
    gone, _ = timed(session)
    session.close()
    beside = beside_others(door, spec, other, neighbours)
    changes = "".join(f"{each / alone - 1:>+{width}.2%}" for each, width in ((waiting, 10), (gone, 10), (beside, 17)))
    return f"{recipe:<44}{1e3 * alone:>10.3f}{spread:>10.2%}{changes}"


def beside_others(door: Door, spec: RunSpec, other: RunSpec, neighbours: int) -> float:
    """In a process that was prepared while others were; they stand still while it is timed."""
    sessions = [door.open(each) for each in (spec, *[other] * neighbours)]
    for session, each in zip(sessions, (spec, *[other] * neighbours), strict=True):
        session.begin(Prepare(spec=each))
    for session in sessions:
        assert isinstance(session.wait(), PreparedReply)
    for session in sessions[1:]:
        session.pause()
    found, _ = timed(sessions[0])
    for session in sessions:
        session.kill()
    return found


def opened(door: Door, spec: RunSpec) -> Session:
    session = door.open(spec)
    reply = session.ask(Prepare(spec=spec))
    assert isinstance(reply, PreparedReply), reply
    return session


def timed(session: Session) -> tuple[float, float]:
    """The median of block medians, and how far they scatter."""
    time.sleep(0.2)
    middles = []
    for number in range(BLOCKS):
        reply = session.ask(Measure(kind="throughput", seconds=SECONDS, round=number))
        assert isinstance(reply, BlockReply), reply
        middles.append(statistics.median(reply.block.samples))
    middle = statistics.median(middles)
    return middle, statistics.median(abs(each - middle) for each in middles) / middle


def spec_of(recipe: str, model: str, batch: int) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model=model, batch=batch),
        recipe=Recipe.parse(recipe),
        measure=MeasureSpec.for_effort("quick"),
        device="cuda:0",
    )


if __name__ == "__main__":
    main()
