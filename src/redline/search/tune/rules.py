"""What experience expects of a step before anything was measured, and how sure it is of that.

Only where to look first: every figure is a wide prior that a few trials overrule. Logarithms of the factor on the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.protocol import StepChoice

COLD_COMPILE_S = 25.0
SLOW_PREPARE_S = 150.0


@dataclass(frozen=True)
class Expectation:
    """Of one step: what it does to the device's time and to the host's."""

    device: float
    device_sd: float
    host: float = 0.0
    host_sd: float = 0.1


ON_GPU: dict[str, Expectation] = {
    "fp16": Expectation(-0.8, 0.3),
    "bf16": Expectation(-0.75, 0.3),
    "amp": Expectation(-0.55, 0.3, 0.3, 0.3),
    "amp-bf16": Expectation(-0.55, 0.3, 0.3, 0.3),
    "tf32": Expectation(-0.4, 0.3),
    "channels-last": Expectation(-0.15, 0.2),
    "compile": Expectation(-0.35, 0.25, -0.3, 0.5),
    "compile:reduce-overhead": Expectation(-0.35, 0.25, -2.0, 0.8),
    "compile:max-autotune": Expectation(-0.38, 0.25, -2.0, 0.8),
    "compile:max-autotune-no-cudagraphs": Expectation(-0.38, 0.25, -0.3, 0.5),
    "compile:freeze": Expectation(-0.4, 0.25, -0.3, 0.5),
    "torchscript": Expectation(-0.1, 0.15, -0.3, 0.4),
    "graphs": Expectation(-0.03, 0.06, -2.5, 0.8),
    "cudnn-benchmark": Expectation(-0.06, 0.1),
    "fused-optimizer": Expectation(-0.05, 0.07, -0.3, 0.3),
    # Eager convolutions add the folded bias in a kernel of its own: on an H200 that took ResNet-50 5 % longer.
    "fold-bn": Expectation(0.0, 0.08, -0.2, 0.3),
    "tensorrt": Expectation(-0.5, 0.4, -0.5, 0.5),
    "onnx": Expectation(0.0, 0.4, -0.3, 0.5),
}
ON_CPU: dict[str, Expectation] = {
    # Few CPUs have arithmetic for them; where they do not, they are many times slower.
    **dict.fromkeys(("fp16", "bf16", "amp", "amp-bf16"), Expectation(2.0, 0.4)),
    "channels-last": Expectation(-0.2, 0.2),
    "compile": Expectation(-0.15, 0.2),
    "compile:freeze": Expectation(-0.35, 0.2),
    "compile:reduce-overhead": Expectation(-0.15, 0.1),
    "torchscript": Expectation(-0.2, 0.2),
    "fold-bn": Expectation(-0.06, 0.08),
    "onnx": Expectation(-0.4, 0.3),
}
UNKNOWN = {
    "host": Expectation(-0.03, 0.1, -2.0, 1.0),
    "both": Expectation(-0.15, 0.3, -0.3, 0.6),
    "device": Expectation(-0.1, 0.3),
}
"""Of steps nobody has experience with, such as plug-ins: by what they say they relieve."""
SHARED_BY_FAMILY = {"precision": 0.4, "compiler": 0.2}
ON_CPU_SHARED = {"precision": 1.0, "compiler": 0.2}
"""What all steps of a family have in common: one slow half precision makes the others suspect."""
DEFAULT_SHARED = 0.1


def expectation(choice: StepChoice, *, on_cpu: bool) -> Expectation:
    table = ON_CPU if on_cpu else ON_GPU
    name = choice.step.partition(":")[0]
    return table.get(choice.step) or table.get(name) or UNKNOWN[choice.relieves]


def shared_sd(family: str, *, on_cpu: bool) -> float:
    return (ON_CPU_SHARED if on_cpu else SHARED_BY_FAMILY).get(family, DEFAULT_SHARED)


def pair_expectation(one: StepChoice, other: StepChoice) -> float:
    """What two steps do beyond their own effects."""
    names, families = {one.step, other.step}, {one.family, other.family}
    if "tf32" in names and "precision" in families:
        return 0.35  # little is left in fp32
    if "channels-last" in names and "precision" in families:
        return -0.1  # tensor cores want the channel innermost
    return 0.0


def prepare_s(choice: StepChoice) -> float:
    """Seconds it may add to a first trial, where nothing is known yet."""
    if choice.is_slow_to_prepare:
        return SLOW_PREPARE_S
    return COLD_COMPILE_S if choice.family in ("compiler", "runtime") else 0.0
