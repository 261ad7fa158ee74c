"""What the newer switches bring on the GPU at hand, and what the probe before a search says of models that differ.

Prints the facts that matter for each model, then one line per recipe: throughput, time to compile, memory, numerics.

    python scripts/check_switches_on_gpu.py [--out FOLDER] [--only facts|infer|train]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from raw_records import RawRecords

import redline
from redline.api.workspace import Workspace
from redline.launch import open_door
from redline.model.questions import AskSwitches, SwitchChoices
from redline.model.spec import LaunchSpec
from redline.model.spec_table import specs_from_table

PROBED = (
    {"model": "convnext_tiny", "batch": 32},
    {"model": "swin_t", "batch": 32},
    {"model": "vit_b_16", "batch": 32},
    {"model": "resnet50", "batch": 32, "task": "train"},
)
INFER = (
    "bf16+compile",
    "bf16+compile:regional",
    "bf16+compile:regional+graphs",
    "bf16+compile:coordinate-descent+graphs",
)
TRAIN = (
    "amp-bf16",
    "amp-bf16+checkpointing",
    "amp-bf16+compile:regional",
    "amp-bf16+compile:regional+fp8",
)
CASES = {
    "infer": ({"model": "vit_b_16", "batch": 32}, INFER),
    "train": ({"model": "vit_b_16", "batch": 64, "task": "train"}, TRAIN),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--only", choices=("facts", *CASES))
    given = arguments.parse_args()
    lines: list[str] = []
    with RawRecords(given.out) as raw, Workspace(door=open_door(LaunchSpec()), journal=raw.journal) as workspace:
        if given.only in (None, "facts"):
            for table in PROBED:
                tell(lines, facts_line(table, workspace))
        for name, (table, recipes) in CASES.items():
            for recipe in recipes if given.only in (None, name) else ():
                tell(lines, row_line(table, recipe, workspace))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "switches.txt").write_text("\n".join(lines) + "\n")


def tell(lines: list[str], line: str) -> None:
    lines.append(line)
    print(line, flush=True)


def facts_line(table: dict, workspace: Workspace) -> str:
    (spec,) = workspace.checked(specs_from_table({**table, "device": "cuda"}))
    told = workspace.ask(AskSwitches(spec=spec), SwitchChoices, spec.launch)
    facts = told.facts
    assert facts is not None
    layers = ", ".join(f"{kind} {layer.calls}× {layer.share:.0%}" for kind, layer in facts.layers.items())
    offered = " ".join(choice.switch for choice in told.choices if choice.refusal is None)
    blocks = f"{facts.blocks.count}× {facts.blocks.class_name} {facts.blocks.share:.0%}" if facts.blocks else "none"
    times = [f"{seconds * 1e3:.2f}" if seconds else "–" for seconds in (facts.step_s, facts.host_s, facts.device_s)]
    return "\n  ".join(
        (
            f"{table}: {facts.seconds:.1f} s",
            f"layers: {layers}; blocks: {blocks}; launches {facts.launches}",
            f"attention: {facts.attention_backends}; reads {facts.reads}; waits {facts.synchronises}; "
            f"branches {facts.branches}; varies {facts.varies_shapes}; mutates {len(facts.mutates)}",
            f"step, host and device in ms: {', '.join(times)}",
            f"offered: {offered}",
        )
    )


def row_line(table: dict, recipe: str, workspace: Workspace) -> str:
    (row,) = redline.run(**table, recipes=recipe, effort="quick", device="cuda", workspace=workspace)
    if row.failure is not None:
        return f"{table['model']} {recipe}: {row.failure.message}"
    cold, memory = row.cold_start_s, row.memory
    compiled = f"{cold.compile_s:.1f} s" if cold is not None and cold.compile_s else "–"
    reserved = f"{memory.peak_reserved_bytes / 2**20:.0f} MiB" if memory and memory.peak_reserved_bytes else "–"
    numerics = "right" if row.numerics is not None and row.numerics.passed else f"WRONG: {row.numerics}"
    return (
        f"{table['model']} {recipe}: {row.throughput_per_s:,.0f} img/s, compiled in {compiled}, {reserved}, {numerics}"
    )


if __name__ == "__main__":
    main()
