"""What Redline says of a step on the GPU: findings, vendors' counters, ceilings and the roofline."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from asking import Ask, Figures, Outcome, apart, within

import redline
from redline.model.errors import RedlineError
from redline.model.migrations import encode

CASES: dict[str, tuple[dict[str, Any], bool | None]] = {
    "fp16_b32": ({"batch": 32, "recipe": "fp16+channels-last"}, True),
    "fp32_b32": ({"batch": 32, "recipe": "baseline"}, False),
    "fp16_b256": ({"batch": 256, "recipe": "fp16"}, False),
    "train_b32": ({"batch": 32, "recipe": "amp+channels-last", "task": "train"}, None),
}
"""How ResNet-50 is profiled, and whether the host limits it; None where either may be."""
FOLLOWED = {
    f"{model} {recipe}": (model, task, batch, recipe)
    for recipe in ("baseline", "fp16", "amp", "graphs", "compile", "compile+graphs")
    for model, task, batch in (("resnet18", "infer", 32), ("transformer", "train", 16))
}
LEAST_COVERED, NOISE = 0.97, 1.03
KNOWN = {"bf16": 791e12, "tf32": 408e12, "fp32": 51e12, "copy": 4.3e12}
"""FLOP/s and bytes/s of an H200 as measured by hand."""
ROOFLINES: dict[str, dict[str, Any]] = {
    "resnet50": {"model": "resnet50", "recipes": ["baseline", "fp16+channels-last+compile:reduce-overhead"]},
    "vit_b_16": {"model": "vit_b_16", "recipes": ["baseline", "fp16+channels-last+compile:freeze+graphs"]},
    "resnet50-train": {
        "model": "resnet50",
        "task": "train",
        "recipes": ["baseline", "amp+channels-last+compile+fused-optimizer+graphs+cudnn-benchmark"],
    },
}


def profile(ask: Ask, row: str, case: tuple[dict[str, Any], bool | None]) -> Outcome:
    """ResNet-50 is host-bound where it is known to be, with `graphs` as advice, and has all phases; keeps a small trace."""
    settings, is_host_bound = case
    with ask.workspace() as workspace:
        model = ask.sized("resnet50", "simple_cnn")
        result = redline.profile(model, device=ask.device, steps=2, workspace=workspace, **settings)
        keep_trace(ask, result, row)
    found = result.profile
    ask.document(result, f"profile_{row}")
    first = next(iter(found.findings), None)
    phases = {"forward", "backward", "optimizer"} if settings.get("task") == "train" else {"forward"}
    says_host = found.bound.label == "host"
    is_right = (
        is_host_bound in (None, says_host)
        and set(found.phases_s) == phases
        and bool(found.kernels or not found.has_device)
    )
    if is_host_bound:
        is_right = is_right and any("graphs" in finding.next for finding in found.findings)
    figures = {"bound": found.bound.label, "first": first and first.code, "gain_bound": first and first.gain_bound}
    figures |= {"unclassified": found.unclassified_share, "findings": [finding.code for finding in found.findings]}
    return is_right and found.unclassified_share < 0.05 and found.lost is None, figures


def keep_trace(ask: Ask, result: redline.ProfileResult, row: str) -> None:
    """The trace and its record, by the names that `tests/data/traces` has."""
    capture, record = result.profile.capture, result.record
    assert capture is not None
    assert record is not None
    card = re.sub(r"[^a-z0-9]+", "", (capture.device_name or "").lower().replace("nvidia", "")) or "cpu"
    folder = ask.out / "traces"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(capture.trace), folder / f"{card}_resnet50_{row}.json.gz")
    (folder / f"{card}_resnet50_{row}.record").write_bytes(encode(record))


def follow(ask: Ask, row: str, case: tuple[str, str, int, str]) -> Outcome:
    """Following the first finding that names a recipe brings no more than its bound; operators cover 97 % of the device's time."""
    model, task, batch, recipe = case
    before = profiled(ask, model, task, batch, recipe)
    found = before.profile
    covered = sum(each.device_share for each in found.operators if each.source in ("operator", "graph"))
    figures: Figures = {"step_ms": step_ms(before), "covered": covered}
    is_covered = covered >= LEAST_COVERED or not found.has_device
    advised = next((finding for finding in found.findings if finding.recipe is not None), None)
    if advised is None:
        return is_covered, {**figures, "finding": found.findings[0].code if found.findings else "none"}
    figures |= {"finding": advised.code, "bound": advised.gain_bound, "tried": advised.recipe}
    try:
        after = profiled(ask, model, task, batch, str(advised.recipe))
    except RedlineError as error:
        return False, {**figures, "problem": str(error).splitlines()[0]}
    gain = step_ms(before) / step_ms(after)
    return is_covered and gain <= advised.gain_bound * NOISE, {**figures, "gain": gain}


@cache
def _profiled(device: str, model: str, task: str, batch: int, recipe: str) -> redline.ProfileResult:
    with redline.Workspace(keep=False) as workspace:
        return redline.profile(
            model, task=task, batch=batch, recipe=recipe, device=device, effort="quick", workspace=workspace
        )


def profiled(ask: Ask, model: str, task: str, batch: int, recipe: str) -> redline.ProfileResult:
    """What one finding advises is often another row, so that each recipe is profiled once."""
    return _profiled(ask.device, ask.sized(model, "simple_cnn"), task, batch, recipe)


def step_ms(result: redline.ProfileResult) -> float:
    assert result.profile.capture is not None
    return (result.profile.capture.step_s or 0.0) * 1e3


def vendor_tool(ask: Ask, name: str, has_counters: bool) -> Outcome:
    """A vendor's profiler lists kernels, and ncu counters too."""
    result = redline.profile("resnet50", batch=32, recipe="fp16+channels-last", tool=name, device=ask.device)
    document = ask.document(result, name)
    counters = [f"{each['name']} {each['value']:.3g}" for each in document["counters"] if each["kernel"] is None]
    kernels = len(document["kernels"])
    return bool(kernels) and (bool(counters) or not has_counters), {"kernels": kernels, "counters": "; ".join(counters)}


def ceilings(ask: Ask, row: str, _: None) -> Outcome:
    """Ceilings measured afresh; on an H200 within 5 % of what was measured by hand."""
    with ask.workspace() as workspace:
        result = redline.roofline(device=ask.device, fresh=True, workspace=workspace)
    document = ask.document(result, "ceilings")
    rows = {row["what"].partition(" ")[0].strip(","): row["measured"] for row in document["tables"]["ceilings"]}
    figures = {name: cell["value"] / 1e12 for name, cell in rows.items() if name != "one" and cell["value"]}
    if "H200" not in document["about"]["device"]:
        return None, figures
    off = {name: apart(figures.get(name), known / 1e12) for name, known in KNOWN.items()}
    return all(within(share, 0.05) for share in off.values()), {**figures, "off": off}


def roofline(ask: Ask, row: str, settings: dict[str, Any]) -> Outcome:
    """No step beats its roofline. Shown are the speed-up, and the speed-up at the roofline of the fast recipe."""
    sized = ask.sized(settings, {**settings, "model": "simple_cnn", "recipes": ["baseline", "channels-last"]})
    with ask.workspace() as workspace:
        result = redline.roofline(batch=32, device=ask.device, workspace=workspace, **sized)
    document = ask.document(result, f"roofline_{row}")
    rows = document["tables"]["recipes"]
    failed = [each["failure"] for each in rows if "failure" in each]
    if failed or len(rows) < 2:
        return False, {"failures": str(failed)}
    base, fast = ({name: cell["value"] for name, cell in each.items() if isinstance(cell, dict)} for each in rows)
    is_sound = all(each["roofline"] <= each["measured"] for each in (base, fast))
    figures = {"speed_up": base["measured"] / fast["measured"], "headroom": fast["headroom"], "mfu": fast["mfu"]}
    figures |= {"at_the_roofline": base["measured"] / fast["roofline"], "limited_by": rows[1]["roof_from"]}
    return is_sound, figures
