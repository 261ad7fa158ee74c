"""Rules about a device that is busy with the wrong things."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from redline.analyze.diagnose.finding import Finding, gain_without, has_step, with_step
from redline.spec import Recipe
from redline.trace.classes import class_of, converts_layout, is_strict_fp32, short_name

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

LAYOUT_SHARE = 0.03
NORM_SHARE = 0.03
FP32_SHARE = 0.10
ELEMENTWISE_SHARE = 0.20
"""Of the device's work: below these, mending it is not worth the trouble."""

_NORM_IN_EVAL = re.compile(r"bn_fw_inf|FwdInfer|batch_norm_transform_input|^aten::native_batch_norm$")
_NORM_IN_TRAINING = re.compile(
    r"collect_statistics|bn_fw_tr|bn_bw|FwdTrain|BnormBwd|BatchNormBwd|batch_norm_back|NormBackward", re.IGNORECASE
)
_FUSED_ALREADY = re.compile(r"^triton_|multi_tensor_apply|^aten::_fused_")


def layout_conversions(profile: Profile) -> Finding | None:
    """Kernels that only turn NCHW into NHWC and back around convolutions."""
    seconds, share, top = _part(profile, converts_layout)
    if share < LAYOUT_SHARE:
        return None
    if has_step(profile, "channels-last"):
        advice = "look in the operator table for what brings the other layout back: channels-last is on already"
    else:
        advice = f"-r {with_step(profile, 'channels-last')}: keep images in the layout the convolutions want"
    return Finding(
        code="layout-conversions",
        evidence=f"{share:.0%} of the device's work only turns one memory layout into the other ({top})",
        next=advice,
        gain_bound=gain_without(profile, seconds),
    )


def fp32_products(profile: Profile) -> Finding | None:
    """Matrix products and convolutions in full fp32, which leave the tensor cores idle."""
    seconds, share, top = _part(profile, is_strict_fp32)
    if share < FP32_SHARE:
        return None
    on_rocm = any(row.name.startswith(("Cijk_", "igemm_", "miopen")) for row in profile.kernels)
    step = "amp" if on_rocm else "tf32"
    also = "" if on_rocm else ", or amp for more"
    return Finding(
        code="fp32-matmul",
        evidence=f"{share:.0%} of the device's work is matrix products and convolutions in full fp32 ({top})",
        next=f"-r {with_step(profile, step)}: tensor cores{also}; the numerics check tells what it costs",
        gain_bound=gain_without(profile, seconds),
    )


def batch_norm_in_eval(profile: Profile) -> Finding | None:
    """Batch-norm with fixed statistics is a scale and a shift, which the convolution before can do itself."""
    names = [*(row.name for row in profile.kernels), *(row.name for row in profile.operators)]
    if any(_NORM_IN_TRAINING.search(name) for name in names):
        return None
    seconds, share, top = _part(profile, lambda name: bool(_NORM_IN_EVAL.search(name)))
    if share < NORM_SHARE or _is_folded(profile):
        return None
    return Finding(
        code="batch-norm-eval",
        evidence=f"{share:.0%} of the device's work is batch-norm with fixed statistics ({top})",
        next=f"-r {with_step(profile, 'fold-bn')}: a scale and a shift that the convolutions before can do themselves",
        gain_bound=gain_without(profile, seconds),
    )


def _is_folded(profile: Profile) -> bool:
    """By name, or by a compiler that freezes the weights."""
    if profile.capture is None:
        return False
    steps = Recipe.parse(profile.capture.recipe).steps
    return any(step.name in ("fold-bn", "torchscript") or step.argument == "freeze" for step in steps)


def unfused_elementwise(profile: Profile) -> Finding | None:
    """Elementwise kernels, one by one: each reads and writes all of memory for one operation."""

    def unfused(name: str) -> bool:
        return class_of(name) == "elementwise" and not _FUSED_ALREADY.search(name)

    seconds, share, top = _part(profile, unfused)
    if share < ELEMENTWISE_SHARE or has_step(profile, "compile"):
        return None
    return Finding(
        code="elementwise",
        evidence=f"{share:.0%} of the device's work is elementwise kernels bound by memory ({top})",
        next=f"-r {with_step(profile, 'compile')}: fuse them, so that each value is read and written once",
        gain_bound=gain_without(profile, seconds),
    )


def _part(profile: Profile, is_meant: Callable[[str], bool]) -> tuple[float, float, str]:
    """Seconds and share of the work whose name is meant, and the name that takes most of it."""
    work = _work(profile)
    meant = [(seconds, name) for name, seconds in work if is_meant(name)]
    whole, part = sum(seconds for _, seconds in work), sum(seconds for seconds, _ in meant)
    return part, part / whole if whole else 0.0, short_name(max(meant)[1]) if meant else ""


def _work(profile: Profile) -> list[tuple[str, float]]:
    """What keeps the device busy: kernels and copies; where the host is the device, operators without their children."""
    if profile.has_device:
        copies = [(row.name, row.total_s) for row in profile.copies]
        return [*((row.name, row.total_s) for row in profile.kernels), *copies]
    return [(row.name, row.cpu_self_s) for row in profile.operators]
