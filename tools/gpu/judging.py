"""Does Redline judge soundly: are wrong numbers and slower code caught, and are right and unchanged ones let pass?"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asking import Ask, Outcome, in_fresh_process
from torchvision.models import list_models

SOUND = ("fp16", "bf16")
MODELS = dict.fromkeys(name for name in list_models() if "/" not in name and not name.startswith("quantized_"))
SMALLEST = {"inception_v3": 96, "maxvit_t": 224, "vit_h_14": 56, "swin_v2_t": 256, "swin_v2_s": 256, "swin_v2_b": 256}
"""Pixels on a CPU, where 64 are too few. Swin V2 then has windows of padding alone, whose norm fp16 rounds to 0."""
LAYERS = 100
SLOWDOWNS = {"same code": 0.0, "3 % slower": 0.03, "10 % slower": 0.1}
MODEL = """
import torch

class Net(torch.nn.Module):  # one layer again and again: many kernels, and hardly any weights to build
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear({width}, {width})
    def forward(self, x):
        for _ in range({layers}):
            x = self.layer(x)
        return x

def net(batch={batch}):
    return Net().eval(), (torch.randn(batch, {width}),)
"""


def numerics(ask: Ask, model: str, _: None) -> Outcome:
    """fp16 and bf16 pass on every classification model of torchvision, and three planted faults are caught."""
    size = None if ask.is_gpu else SMALLEST.get(model, 64)
    errors, wrong = in_fresh_process(judged, model, size, ask.device)
    return not wrong, {**errors, "misjudged": "; ".join(wrong) or None}


def judged(model: str, size: int | None, device_name: str) -> tuple[dict[str, float | None], list[str]]:
    """The errors of the sound recipes, and what was misjudged."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models"))
    import planted_faults

    from redline.bench.device import open_device, resolve_device
    from redline.bench.recipe.compose import apply_recipe, number_format_of
    from redline.bench.recipe.numerics import OutputReference
    from redline.bench.workload.build import build_workload
    from redline.bench.workload.signal import give_signal
    from redline.bench.workload.step import InferenceStep
    from redline.model.spec import Recipe, WorkloadSpec

    device = open_device(resolve_device(device_name))
    spec = WorkloadSpec(model=model, batch=8, image_size=size)
    workload = build_workload(spec, seed=0).to(device.torch_device)
    give_signal(workload)
    errors: dict[str, float | None] = {}
    wrong = []
    for form in ("", *SOUND):
        references: dict[str, OutputReference] = {}
        for fault in ("", *planted_faults.FAULTS):
            if not (form or fault):
                continue
            recipe = Recipe.parse("+".join(filter(None, (form, fault))))
            own = number_format_of(recipe, "infer")
            if own not in references:
                references[own] = OutputReference.of(workload, device, own, seed=0)
            changed = copy.copy(workload)
            changed.model = copy.deepcopy(workload.model)
            setup = apply_recipe(recipe, changed, device)
            found = references[own].judge(InferenceStep(setup), setup)
            if not fault:
                errors[form] = found.rel_l2
            wrong += [f"{recipe}: {found.reason}"] if found.passed != (not fault) else []
    return errors, wrong


def gate(ask: Ask, row: str, slowdown: float) -> Outcome:
    """`redline gate` fails a model that got more layers since the commit, and passes one that did not."""
    width, batch, block_s = ask.sized((2048, 256, 0.06), (128, 32, 0.1))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model.py").write_text(MODEL.format(layers=LAYERS, width=width, batch=batch))
        (folder / "bench.toml").write_text(
            f'device = "{ask.device}"\nthreshold = {slowdown or 0.03}\n{ask.sized("", "threads = 1")}\n'
            f"measure = {{ block_seconds = {block_s}, check_numerics = false }}\n"
            '[[run]]\nname = "net"\nmodel = "model.py:net"\nfail_on = ["kernels"]\n'
        )
        git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
        for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *words], cwd=folder, check=True)
        layers = round(LAYERS * (1 + slowdown))
        (folder / "model.py").write_text(MODEL.format(layers=layers, width=width, batch=batch))
        command = [sys.executable, "-m", "redline", "gate", "bench.toml", "--baseline", "main", "--json"]
        done = subprocess.run(
            [*command, "--budget", ask.budget], cwd=folder, stdout=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "REDLINE_STORE": str(ask.raw.history("gate"))},
        )  # fmt: skip
    (found,) = json.loads(done.stdout)["benchmarks"]
    has_more_kernels = any(each["failed"] for each in found["checks"])
    is_right = (found["verdict"] == "slower") == bool(slowdown) and has_more_kernels == bool(slowdown)
    return is_right, {"verdict": found["verdict"], "change": found["change"], "more_kernels": has_more_kernels}
