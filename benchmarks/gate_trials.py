"""How often the gate catches a slowdown, and how often it raises a false alarm, on machines whose truth is known.

    python benchmarks/gate_trials.py [--runs 200] [--stored]

Each run is a whole gate of one benchmark against FakeBench. `quiet` to `outliers` are machines; the columns are true
slowdowns. A cell is the share of runs with the verdict `slower`; below 0 % it is a false alarm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import msgspec

from redline.record import RunRecord
from redline.search.gate import GateRun
from redline.search.observer import NoJournal, Observer
from redline.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

MACHINES: dict[str, dict[str, Any]] = {
    "quiet": {"offset_sigma": 0.003},
    "noisy": {"offset_sigma": 0.01, "noise_sigma": 0.05, "noise_rho": 0.5, "tail_share": 0.02},
    "drifting": {"offset_sigma": 0.005, "drift_sigma": 0.02},
    "two modes": {"offset_sigma": 0.005, "slow_share": 0.5, "slow_factor": 1.04},
    "outliers": {"offset_sigma": 0.01, "slow_share": 0.08, "slow_factor": 1.3},
}
STEP_S = 0.01
BUDGET_S = 3600.0
BASELINE = RunSpec(
    workload=WorkloadSpec(model="m", batch=8),
    measure=MeasureSpec.for_effort("quick"),
    launch=LaunchSpec(folder="/baseline"),
)
CANDIDATE = msgspec.structs.replace(BASELINE, launch=LaunchSpec())


def landscape(machine: str, slowdown: float, seed: int) -> Landscape:
    def step_s(spec: RunSpec) -> float:
        return STEP_S if spec.launch.folder else STEP_S * (1 + slowdown)

    return Landscape(step_s=step_s, seed=seed, device_kind="cuda", **MACHINES[machine])


def interleaved(machine: str, slowdown: float, seed: int, threshold: float = 0.03) -> GateRun:
    """One gate with both sides measured."""
    door = FakeDoor(landscape(machine, slowdown, seed))
    run = GateRun(
        door, NoJournal(), Observer(), threshold=threshold, budget_s=BUDGET_S, seed=seed, clock=lambda: door.clock_s
    )
    run.interleaved(BASELINE, CANDIDATE)
    return run


def stored(machine: str, slowdown: float, seed: int, threshold: float = 0.03, processes: int = 10) -> GateRun:
    """One gate against records of the baseline that were measured before."""
    door = FakeDoor(landscape(machine, slowdown, seed))
    kept: list[RunRecord] = []
    before = GateRun(door, NoJournal(), Observer(), threshold=threshold, budget_s=BUDGET_S, clock=lambda: door.clock_s)
    for _ in range(processes):
        kept += before.one_process(BASELINE)
    run = GateRun(
        door, NoJournal(), Observer(), threshold=threshold, budget_s=BUDGET_S, seed=seed, clock=lambda: door.clock_s
    )
    run.against(lambda first: kept, CANDIDATE)
    return run


def verdicts(make: Callable[[str, float, int], GateRun], machine: str, slowdown: float, runs: int) -> list[str]:
    found = (make(machine, slowdown, seed).judged for seed in range(runs))
    return [judged.verdict if judged else "incomparable" for judged in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--stored", action="store_true", help="against stored records instead of interleaved")
    arguments = parser.parse_args()
    slowdowns = (0.0, 0.02, 0.03, 0.05)
    print(f"share of 'slower' ('faster', undecided) in {arguments.runs} runs, threshold 3 %")
    print("machine     " + "".join(f"{f'{each:.0%} slower':>26}" for each in slowdowns))
    for machine in MACHINES:
        cells = []
        for slowdown in slowdowns:
            told = verdicts(stored if arguments.stored else interleaved, machine, slowdown, arguments.runs)
            slower, faster, undecided = (told.count(each) / len(told) for each in ("slower", "faster", "inconclusive"))
            cells.append(f"{f'{slower:.1%} ({faster:.1%}, {undecided:.1%})':>26}")
        print(f"{machine:<12}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
