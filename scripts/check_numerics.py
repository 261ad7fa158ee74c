"""Does the numerics check judge soundly on random weights? Every torchvision classification model, on the device at hand.

For each model the sound recipes must pass and three planted faults must be caught, in fp32 and under each number
format. Prints one line per model and a closing count; exits 1 when anything is misjudged.

    python scripts/check_numerics.py [--device auto] [--batch 8] [--small] [PATTERN]
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))

import planted_faults

from redline.bench.device import Device, open_device, resolve_device
from redline.bench.recipe.compose import apply_recipe, number_format_of
from redline.bench.recipe.numerics import OutputReference
from redline.bench.workload.build import build_workload, list_models
from redline.bench.workload.signal import give_signal
from redline.bench.workload.step import InferenceStep
from redline.bench.workload.workload import Workload
from redline.model.record import Numerics
from redline.model.spec import Recipe, WorkloadSpec

SOUND = ("fp16", "bf16")
SMALLEST_SIZES = {
    "inception_v3": 96,
    "maxvit_t": 224,
    "vit_h_14": 56,
    "swin_v2_t": 256,
    "swin_v2_s": 256,
    "swin_v2_b": 256,
}
"""`--small`: 64 pixels where the architecture allows it. Smaller pictures leave Swin V2 with windows of padding alone, whose
norm fp16 rounds to 0: its answer is then really not finite, and the check says so."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("pattern", nargs="?")
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--small", action="store_true")
    given = arguments.parse_args()
    device = open_device(resolve_device(given.device))
    names = [
        model.name
        for model in list_models(given.pattern)[0]
        if (model.source, model.kind) == ("torchvision", "classification")
    ]
    misjudged = []
    for name in names:
        size = SMALLEST_SIZES.get(name, 64) if given.small else None
        started = time.perf_counter()
        judged = judge(WorkloadSpec(model=name, batch=given.batch, image_size=size), device)
        wrong = [recipe for recipe, numerics in judged.items() if numerics.passed != (recipe in SOUND)]
        misjudged += [f"{name} {recipe}: {judged[recipe].reason}" for recipe in wrong]
        told = "  ".join(
            f"{recipe} {told_number(judged[recipe].rel_l2)}/{told_number(judged[recipe].floor)}" for recipe in SOUND
        )
        print(
            f"{name:<24} {told}  {'MISJUDGED ' + ', '.join(wrong) if wrong else 'ok'}  {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    print(*misjudged, sep="\n")
    print(f"{len(names)} models, {len(misjudged)} misjudged")
    sys.exit(1 if misjudged or not names else 0)


def told_number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def judge(spec: WorkloadSpec, device: Device) -> dict[str, Numerics]:
    workload = build_workload(spec, seed=0).to(device.torch_device)
    give_signal(workload)
    found: dict[str, Numerics] = {}
    for number_format in ("", *SOUND):
        references: dict[str, OutputReference] = {}
        for fault in ("", *planted_faults.FAULTS):
            recipe = Recipe.parse("+".join(filter(None, (number_format, fault))) or "baseline")
            if recipe.switches:
                own_format = number_format_of(recipe, "infer")
                if own_format not in references:
                    references[own_format] = OutputReference.of(workload, device, own_format, seed=0)
                found[str(recipe)] = judged_recipe(recipe, workload, references[own_format], device)
    del workload
    gc.collect()
    device.release_cache()
    return found


def judged_recipe(recipe: Recipe, workload: Workload, reference: OutputReference, device: Device) -> Numerics:
    copied = Workload(**{**vars(workload), "model": copy.deepcopy(workload.model)})
    setup = apply_recipe(recipe, copied, device)
    return reference.judge(InferenceStep(setup), setup)


if __name__ == "__main__":
    main()
