"""How often the gate catches a slowdown, and how often it raises a false alarm, on machines whose truth is known.

    python benchmarks/gate_trials.py [--runs 200] [--stored] [--machine NAME …] [--slowdown 0 …]

Each run is a whole gate of one benchmark against FakeBench. The rows are machines, the columns true slowdowns. A cell is the
share of runs with the verdict `slower` (in the column 0 % a false alarm), then `faster` and undecided in brackets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from redline.model.record import RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
from redline.search.gate import GateRun
from redline.search.observer import NoJournal, Observer
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

MACHINES: dict[str, dict[str, Any]] = {
    "quiet": {"offset_sigma": 0.003},
    "noisy": {"offset_sigma": 0.01, "noise_sigma": 0.05, "noise_rho": 0.5, "tail_share": 0.02},
    "drifting": {"offset_sigma": 0.005, "drift_sigma": 0.02},
    "two modes": {"offset_sigma": 0.005, "slow_share": 0.5, "slow_factor": 1.04},
    "outliers": {"offset_sigma": 0.01, "slow_share": 0.08, "slow_factor": 1.3},
    "correlated": {"offset_sigma": 0.003, "noise_sigma": 0.05, "noise_rho": 0.98},
}
"""Machines as the landscape of a fake bench describes them."""


def heavy_tails(chance: np.random.Generator) -> dict[str, Any]:
    """Processes differ by little, and now and then by a lot: Student's t with 2.5 degrees of freedom."""
    offsets = np.exp(0.005 * chance.standard_t(2.5, 1000))
    return {"pace": lambda number, age_s, clock_s: offsets[number % 1000], "tail_share": 0.05}


def warming(chance: np.random.Generator) -> dict[str, Any]:
    """Each process begins 5 % slower and becomes steady over some seconds."""
    return {"offset_sigma": 0.003, "pace": lambda number, age_s, clock_s: 1 + 0.05 * np.exp(-age_s / 3)}


def alternating(chance: np.random.Generator) -> dict[str, Any]:
    """Every other process is 4 % slower."""
    return {"offset_sigma": 0.003, "pace": lambda number, age_s, clock_s: 1.04 if number % 2 else 1.0}


def periodic(chance: np.random.Generator) -> dict[str, Any]:
    """A neighbour that works for 20 s of each minute makes everything 10 % slower."""
    phase_s = chance.uniform(0, 60)
    pace = lambda number, age_s, clock_s: np.where((clock_s + phase_s) % 60 < 20, 1.1, 1.0)  # noqa: E731
    return {"offset_sigma": 0.005, "pace": pace}


def shifting(chance: np.random.Generator) -> dict[str, Any]:
    """The machine becomes 8 % slower at some moment of the first minute, and stays so."""
    moment_s = chance.uniform(0, 60)
    return {"offset_sigma": 0.005, "pace": lambda number, age_s, clock_s: np.where(clock_s > moment_s, 1.08, 1.0)}


DRAWN: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "heavy tails": heavy_tails,
    "warming up": warming,
    "alternating": alternating,
    "periodic": periodic,
    "shifting": shifting,
}
"""Machines that differ from run to run."""

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

    made = MACHINES[machine] if machine in MACHINES else DRAWN[machine](np.random.default_rng([seed, 1]))
    return Landscape(step_s=step_s, seed=seed, device_kind="cuda", **made)


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
    parser.add_argument("--machine", action="append", choices=[*MACHINES, *DRAWN], help="only these")
    parser.add_argument("--slowdown", action="append", type=float, help="only these, such as 0.02")
    arguments = parser.parse_args()
    slowdowns = arguments.slowdown or (0.0, 0.02, 0.03, 0.05)
    print(f"share of 'slower' ('faster', undecided) in {arguments.runs} runs, threshold 3 %")
    print("machine     " + "".join(f"{f'{each:.0%} slower':>26}" for each in slowdowns))
    for machine in arguments.machine or (*MACHINES, *DRAWN):
        cells = []
        for slowdown in slowdowns:
            told = verdicts(stored if arguments.stored else interleaved, machine, slowdown, arguments.runs)
            slower, faster, undecided = (told.count(each) / len(told) for each in ("slower", "faster", "inconclusive"))
            cells.append(f"{f'{slower:.1%} ({faster:.1%}, {undecided:.1%})':>26}")
        print(f"{machine:<12}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
